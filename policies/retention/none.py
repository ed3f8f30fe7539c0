"""No reuse after a turn's end: its blocks lose their hashes at once. (Requests that run together still share.)"""

from simcore.models.decision_points import Release, Retention
from simcore.models.views import Engine, Turn


class None_(Retention):
    """The null policy of retention. `None` is a word of Python's, hence the underscore in the class name."""

    def at_turn_end(self, turn: Turn, engine: Engine) -> Release:
        return Release("never")
