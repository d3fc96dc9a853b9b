"""Who may import whom, and what an import must not do."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def modules_after(code: str) -> set[str]:
    """Modules that are loaded after a fresh interpreter has run `code`."""
    program = f"{code}\nimport sys\nprint('\\n'.join(sorted(sys.modules)))"
    result = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=60, check=True
    )
    return set(result.stdout.splitlines())


def test_contracts_are_kept() -> None:
    """The import contracts of pyproject.toml hold."""
    script = Path(sys.executable).parent / "lint-imports"
    result = subprocess.run([str(script)], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stdout[-3000:]


@pytest.mark.parametrize("package", ["ps", "workers"])
def test_packages_load_neither_torch_nor_grpc(package: str) -> None:
    """`import ps` and `import workers` cost nothing: what is heavy loads on first use."""
    assert not modules_after(f"import {package}") & {"torch", "grpc", "numpy", "rich"}


def test_torch_is_not_loaded_by_the_command_line() -> None:
    """Building the whole command line, the launcher, and the coordinator's client leave torch out: they answer fast."""
    loaded = modules_after(
        "import contextlib, io\n"
        "from workers.cli import main\n"
        "with contextlib.suppress(SystemExit), contextlib.redirect_stdout(io.StringIO()): main(['--help'])\n"
        "import workers.launch, ps.control.client, ps.views, workers.script"
    )
    assert "torch" not in loaded


def test_imports_start_nothing() -> None:
    """Importing every module starts no thread, no process, and leaves signal handlers and log handlers alone."""
    program = """
import logging, pkgutil, importlib, signal, threading
import torch, grpc  # theirs is not ours to judge
before = {thread.ident for thread in threading.enumerate()}
handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGCHLD)]
import ps, workers
for package in (ps, workers):
    for module in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
        if not module.name.endswith("__main__"):
            importlib.import_module(module.name)
assert {thread.ident for thread in threading.enumerate()} == before, threading.enumerate()
assert [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM, signal.SIGCHLD)] == handlers
assert not logging.getLogger("ps").handlers and not logging.getLogger("workers").handlers
"""
    result = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert result.returncode == 0, result.stderr[-3000:]
