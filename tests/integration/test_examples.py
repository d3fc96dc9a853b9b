"""The examples on real data learn: alone, and on a cluster of two servers and two workers."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.cluster import ROOT, Local, clean_environment

LEARNS = [
    # 3.2 when only how often each letter occurs is known
    ("transformer_lm.py", ["--epochs=1", "--letters=20"], "test_loss", lambda loss: loss < 2.8),
    ("mnist_conv.py", ["--epochs=3"], "test_accuracy", lambda accuracy: accuracy > 0.9),
]


@pytest.mark.parametrize(("name", "arguments", "number", "is_good"), LEARNS)
def test_on_a_cluster(tmp_path: Path, name: str, arguments: list[str], number: str, is_good: object) -> None:
    """The reported number says that the model has learned."""
    with Local(ROOT / "examples" / name, tmp_path, servers=2, workers=2, arguments=arguments) as local:
        assert local.wait() == 0, local.out + local.err
    assert callable(is_good) and is_good(local.summary()["final"][number]), local.summary()["final"]
    assert local.err == ""


@pytest.mark.slow
@pytest.mark.parametrize(("name", "arguments", "number", "is_good"), LEARNS)
def test_alone(name: str, arguments: list[str], number: str, is_good: object) -> None:
    """The same script without any cluster; nothing but the result is printed, and no warning."""
    command = [sys.executable, "-W", "error", str(ROOT / "examples" / name), *arguments]
    done = subprocess.run(command, env=clean_environment(), capture_output=True, text=True, timeout=100)
    assert done.returncode == 0 and done.stderr == "", done.stderr
    words = done.stdout.split()
    assert callable(is_good) and is_good(float(words[2])), done.stdout
