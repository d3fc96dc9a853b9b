"""A worker started by `python script.py`, without `psctl` and without a `with` block: its exit code ends the job."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.cluster import Process, clean_environment
from tests.support.polling import assert_eventually


@pytest.mark.parametrize(
    ("end", "code", "outcome", "reason"),
    [
        ("sys.exit(3)", 3, "failed", "exit code 3"),
        ("sys.exit('no data')", 1, "failed", "no data"),
        ("sys.exit()", 0, "finished", ""),
        ("try: sys.exit(3)\nexcept SystemExit: pass", 0, "finished", ""),
        ("raise ValueError('no data')", 1, "failed", "ValueError: no data"),
    ],
)
def test_exit_code(tmp_path: Path, end: str, code: int, outcome: str, reason: str) -> None:
    """Uncaught exits and exceptions are failures with their code; a caught one is none."""
    script = tmp_path / "script.py"
    script.write_text(f"import sys, workers\nworker = workers.join()\n{end}\n")
    files = [f"--address-file={tmp_path / 'address'}", f"--summary-file={tmp_path / 'summary.json'}"]
    with Process(["coordinator", f"--state={tmp_path / 'state'}", *files], tmp_path, "coordinator") as coordinator:
        assert_eventually((tmp_path / "address").exists)
        env = {**clean_environment(), "PS_COORDINATOR": (tmp_path / "address").read_text().strip()}
        done = subprocess.run([sys.executable, str(script)], env=env, capture_output=True, text=True, timeout=60)
        assert done.returncode == code, done.stderr
        assert coordinator.wait() == (0 if outcome == "finished" else 1)
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["outcome"] == outcome and reason in summary["reason"]
