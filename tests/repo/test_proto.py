"""The generated stubs in ps/v1 are what proto/ gives."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_stubs_are_up_to_date(tmp_path: Path) -> None:
    """Generating again gives the committed files, no more and no less (else: make proto)."""
    protos = sorted(str(path.relative_to(ROOT)) for path in (ROOT / "proto").rglob("*.proto"))
    out = [f"--{kind}={tmp_path}" for kind in ("python_out", "pyi_out", "grpc_python_out")]
    subprocess.run(
        [sys.executable, "-m", "grpc_tools.protoc", "-Iproto", *out, *protos], cwd=ROOT, check=True, timeout=60
    )
    fresh = {path.name: path.read_text() for path in (tmp_path / "ps" / "v1").iterdir()}
    committed = {path.name: path.read_text() for path in (ROOT / "ps" / "v1").glob("*_pb2*")}
    assert sorted(fresh) == sorted(committed)
    assert [name for name in fresh if fresh[name] != committed[name]] == []
