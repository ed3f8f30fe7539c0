"""Errors that a user can act on: each names the place, what was found and what is allowed."""

from __future__ import annotations


class SimcoreError(Exception):
    """Base of every error that simcore raises on purpose."""


class BadInput(SimcoreError):
    """Input that is refused before any simulated time passes.

    `where` is a file (with `:line`) or a command-line option, `key` the field in it.
    """

    def __init__(self, where: str, key: str = "", *, found: object = None, allowed: str = "", why: str = "") -> None:
        self.where, self.key, self.found, self.allowed, self.why = where, key, found, allowed, why
        parts = [where]
        if key:
            parts.append(key)
        if why:
            parts.append(why)
        if found is not None:
            parts.append(f"found {_short(found)}")
        if allowed:
            parts.append(f"allowed: {allowed}")
        super().__init__(": ".join(parts))

    def __reduce__(self):  # keyword-only arguments survive the way back from a worker process
        return (_rebuild, (type(self), self.where, self.key, self.found, self.allowed, self.why))


class ConfigError(BadInput):
    """A study file or a `--set` override that is refused."""


class TraceError(BadInput):
    """A trace row that is refused; `where` is `file:line`."""


class PolicyError(SimcoreError):
    """An illegal decision. Never repaired silently: the run ends and names policy, time and decision."""

    def __init__(self, policy: object, time: float, decision: str) -> None:
        self.policy, self.time, self.decision = policy, time, decision
        name = policy if isinstance(policy, str) else type(policy).__name__
        super().__init__(f"policy {name} at t={time:.6f} s: {decision}")

    def __reduce__(self):
        name = self.policy if isinstance(self.policy, str) else type(self.policy).__name__
        return (PolicyError, (name, self.time, self.decision))


class NoProgress(SimcoreError):
    """The watchdog: decisions were taken for a long while and no token came of them."""


def _rebuild(cls, where, key, found, allowed, why):
    return cls(where, key, found=found, allowed=allowed, why=why)


def _short(value: object, limit: int = 120) -> str:
    text = repr(value)
    return text if len(text) <= limit else text[: limit - 3] + "..."
