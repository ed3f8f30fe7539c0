"""torch and Triton, which only real execution needs."""

from __future__ import annotations

from types import ModuleType

from simcore.errors import ConfigError

INSTALL = "pip install 'simcore[kernels]'"
OLDEST_TORCH = (2, 11)


def require() -> ModuleType:
    """The torch module. Raises ConfigError, which says what to install, where torch >= 2.11 or Triton is missing."""
    try:
        import torch
        import triton  # noqa: F401
    except ImportError as error:
        raise ConfigError("kernels", why=f"real execution needs torch and Triton ({error})", allowed=INSTALL) from None
    if tuple(int(part) for part in torch.__version__.split(".")[:2]) < OLDEST_TORCH:
        raise ConfigError("kernels", why="real execution needs torch >= 2.11", found=torch.__version__, allowed=INSTALL)
    return torch
