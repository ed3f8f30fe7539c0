"""Settings of every test; its place here also lets every test import the helpers of this folder (serving_runs)."""

import os
from pathlib import Path

from hypothesis import settings

# Without a GPU the kernels run under Triton's interpreter, which is switched on before anything imports Triton.
if not Path("/dev/nvidiactl").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")

# Hypothesis measures wall-clock time by default and fails on it; no test here may.
settings.register_profile("simcore", deadline=None)
settings.load_profile("simcore")
