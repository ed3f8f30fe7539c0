"""Program-level FCFS: turns are served in the order in which their programs arrived, preempted ones before all others."""

from simcore.models.decision_points import Admission
from simcore.models.views import Turn


class ProgramFcfs(Admission):
    """The queue of Continuum without its pins: its ablation "Program FCFS" (arXiv 2511.02230, section 6 and fig. 16). Times
    are arrivals at the cluster (s); ties go by request id."""

    def key(self, turn: Turn, now: float) -> tuple:
        return (not turn.preempted, turn.program_arrival)
