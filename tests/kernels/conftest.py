"""Without a CUDA device the kernels run under Triton's interpreter, which must be switched on before Triton is imported."""

import os

import pytest

try:
    import torch

    DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
except ImportError:  # each test module then skips itself
    DEVICE = "cpu"
if DEVICE == "cpu":
    os.environ.setdefault("TRITON_INTERPRET", "1")


@pytest.fixture(scope="session")
def device():
    """Where the tensors of a test live: "cuda" where there is one."""
    return DEVICE
