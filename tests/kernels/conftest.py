"""Where the kernels run: on a GPU where there is one, else under Triton's interpreter (tests/conftest.py)."""

import pytest

try:
    import torch

    DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
except ImportError:  # each test module then skips itself
    DEVICE = "cpu"


@pytest.fixture(scope="session")
def device():
    """Where the tensors of a test live: "cuda" where there is one."""
    return DEVICE
