"""Admission: which requests enter, in which order, and who is preempted."""
