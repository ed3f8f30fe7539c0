"""Care for numba's cache of compiled functions."""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import sha256
from pathlib import Path


def forget_stale(folder: Path, sources: Sequence[str]) -> None:
    """Delete what numba has cached of these files of `folder` if one of them has changed since.

    Numba keeps a compiled function for as long as its own file stays the same, though functions of other files are compiled
    into it: after a change in one of those it would go on running the old code. To be called before the first of the
    functions is. A place that cannot be written keeps what it has.
    """
    import numba

    stems = {Path(name).stem for name in sources}
    try:
        stamp = sha256(b"\0".join((folder / name).read_bytes() for name in sources)).hexdigest()
        elsewhere = getattr(numba.config, "CACHE_DIR", "")
        for place in [Path(elsewhere)] if elsewhere else [folder / "__pycache__"]:
            note = place / f"{folder.name}.kernels"
            if note.exists() and note.read_text(encoding="ascii") == stamp:
                continue
            for old in place.rglob("*.nb[ic]"):
                if old.name.split(".")[0] in stems:
                    old.unlink(missing_ok=True)
            place.mkdir(parents=True, exist_ok=True)
            note.write_text(stamp, encoding="ascii")
    except OSError:
        pass
