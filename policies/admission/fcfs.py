"""First come, first served: vLLM's default order. A preempted request goes back to the front of the queue."""

from simcore.models.decision_points import Admission


class Fcfs(Admission):
    """All defaults. Since the newest running request is preempted first, every preempted request arrived before every
    waiting one, and ordering by arrival is the same as vLLM's prepending."""
