"""What needs torch says so; nothing else does."""

from __future__ import annotations

import subprocess
import sys

WITHOUT = "import sys; sys.modules['torch'] = sys.modules['triton'] = None\n"


def run(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", WITHOUT + code], capture_output=True, text=True, check=False)


def test_real_execution_says_what_to_install(tmp_path):
    done = run(f"from simcore.experiments import cli; cli.main(['validate', 'live', '--out', {str(tmp_path / 'x')!r}])")
    assert done.returncode == 2 and "pip install 'simcore[kernels]'" in done.stderr
    assert not (tmp_path / "x").exists()


def test_all_else_is_imported_without_torch():
    done = run("""
import importlib, pkgutil, simcore
for name in ("traces", "models", "policies", "experiments"):
    package = importlib.import_module(f"simcore.{name}")
    for module in pkgutil.walk_packages(package.__path__, f"simcore.{name}."):
        if not module.name.startswith("simcore.experiments.gpu_validation"):
            importlib.import_module(module.name)
""")
    assert done.returncode == 0, done.stderr
