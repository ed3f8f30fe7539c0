"""vLLM's prefix caching: blocks of an ended turn stay findable until the free list hands them out, oldest first."""

from simcore.models.decision_points import Retention


class Lru(Retention):
    """All defaults: `Release("lru")`. Not a wipe: what is released is overwritten only under pressure."""
