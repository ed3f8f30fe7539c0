"""Random numbers that depend on names, never on the order in which they are asked for.

Two policies under one seed then meet the same world even when they act in another order (common random numbers).
"""

from __future__ import annotations

import hashlib
from operator import index
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np

Entity = int | str


def digest(seed: int, name: str, *entity: Entity) -> bytes:
    """32 bytes that are a function of the arguments alone (SHA-256 over their unambiguous text).

    An integer of numpy's counts as the same number of Python's; TypeError for an entity that is neither int nor str.
    """
    text = "\x1f".join([str(index(seed)), _escaped(name), *map(_text, entity)])
    return hashlib.sha256(text.encode()).digest()


def uniform(seed: int, name: str, *entity: Entity) -> float:
    """A float in [0, 1) with 53 random bits."""
    return (int.from_bytes(digest(seed, name, *entity)[:8], "big") >> 11) * 2.0**-53


def generator(seed: int, name: str, *entity: Entity) -> np.random.Generator:
    """A numpy generator of its own for (seed, name, entity): for drawing whole columns when a workload is built."""
    import numpy as np

    return np.random.Generator(np.random.PCG64(int.from_bytes(digest(seed, name, *entity), "big")))


def _text(entity: Entity) -> str:
    return f"str:{_escaped(entity)}" if isinstance(entity, str) else f"int:{index(entity)}"


def _escaped(text: str) -> str:
    """Without the separator, so that no string can pass for two."""
    return text.replace("\\", "\\\\").replace("\x1f", "\\s")
