"""What kernels/ does on one GPU: right or wrong, how near to its rooflines, and how near a real engine is to its model.

`python -m simcore.experiments.gpu_validation.script --out FILE.json`; README.md says what the keys of the file mean.
"""

from __future__ import annotations

import hashlib
from pathlib import Path

import simcore.kernels


def kernels_sha256() -> str:
    """Over names and bytes of kernels/*.py: tells whether a committed result is of the kernels as they are."""
    digest = hashlib.sha256()
    for path in sorted(Path(simcore.kernels.__file__).parent.glob("*.py")):
        digest.update(f"{path.name}\0".encode() + path.read_bytes() + b"\0")
    return digest.hexdigest()
