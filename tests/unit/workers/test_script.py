"""How a script's end becomes an exit code, a traceback and an error file."""

from __future__ import annotations

import json
import runpy
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from ps.config import MemberConfig
from ps.errors import ConfigError, CoordinatorLost, GroupLost, JobFailed, ModelMismatch
from ps.types import Address
from workers import script
from workers.lifecycle import WorkerDrained, WorkerStopped

CONFIG = MemberConfig(coordinator=Address("127.0.0.1", 1), name="worker-3")


@pytest.fixture(autouse=True)
def _as_before(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Run scripts in this process: put back what that changes, and talk to no coordinator."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "argv", list(sys.argv))
    monkeypatch.setattr(script, "_report_without_worker", lambda error, code, config: None)
    yield
    for number, handler in handlers.items():
        signal.signal(number, handler)


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (None, 0),
        (SystemExit(), 0),
        (SystemExit(3), 3),
        (SystemExit(259), 3),
        (SystemExit("no data"), 1),
        (WorkerDrained("SIGTERM"), 0),
        (WorkerStopped(130), 130),
        (KeyboardInterrupt(), 130),
        (ValueError("x"), 1),
        (ModelMismatch("x"), 1),
        (JobFailed("x"), 1),
        (CoordinatorLost("x"), 3),
        (GroupLost("x"), 1),
    ],
)
def test_exit_codes(error: BaseException | None, code: int) -> None:
    """What Python would exit with, and codes of our own for what is not the script's fault."""
    assert script._exit_code(error) == code


def run(folder: Path, code: str, error_file: Path | None = None) -> int:
    """Run a script with this text."""
    path = folder / "train.py"
    path.write_text(code)
    return script.run_script(path, ["--flag", "x"], CONFIG, error_file=error_file)


def test_traceback_begins_in_the_script(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Nothing of what started the script is shown, like with `python train.py`."""
    assert run(tmp_path, "def f():\n    raise ValueError('bad shape')\nf()\n") == 1
    shown = capsys.readouterr().err
    assert shown.splitlines()[1].strip() == f'File "{tmp_path / "train.py"}", line 3, in <module>'
    assert shown.endswith("ValueError: bad shape\n")
    assert runpy.__file__ not in shown and script.__file__ not in shown


def test_error_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """For the launcher the failure goes into a file, and no traceback to stderr."""
    path = tmp_path / "error.json"
    assert run(tmp_path, "import sys; sys.exit(7)\n", path) == 7
    assert json.loads(path.read_text()) == {
        "name": "worker-3", "exit_code": 7, "error": "exit code 7", "traceback": "",
    }  # fmt: skip
    assert "Traceback" not in capsys.readouterr().err


@pytest.mark.parametrize(("status", "line"), [("7", "exit code 7"), ("'no data\\nhere'", "no data")])
def test_an_exit_of_a_joined_script_is_told_as_the_user_wrote_it(tmp_path: Path, status: str, line: str) -> None:
    """While a worker is joined `sys.exit` raises a class of ours, whose name is nobody's business."""
    path = tmp_path / "error.json"
    text = f"import sys\nfrom workers.exits import Exits\nExits().install()\nsys.exit({status})\n"
    previous = sys.exit
    try:
        assert run(tmp_path, text, path) != 0
    finally:
        sys.exit = previous
    assert json.loads(path.read_text())["error"] == line


def test_a_job_that_failed_elsewhere_is_no_failure_of_this_script(tmp_path: Path) -> None:
    """The first cause is shown, not what it made others raise."""
    path = tmp_path / "error.json"
    assert run(tmp_path, "from ps.errors import JobFailed\nraise JobFailed('worker-0 failed')\n", path) == 1
    assert not path.exists()


def test_sigterm_before_joining(tmp_path: Path) -> None:
    """A script that has not joined yet ends in order: exit code 0, its `finally` blocks run."""
    code = (
        "import os, signal, sys\n"
        "try:\n    os.kill(os.getpid(), signal.SIGTERM)\n    while True: pass\n"
        "finally: open(sys.argv[0] + '.done', 'w').close()\n"
    )
    assert run(tmp_path, code) == 0
    assert (tmp_path / "train.py.done").exists()


def test_no_such_script(tmp_path: Path) -> None:
    """A wrong path is a wrong setting."""
    with pytest.raises(ConfigError, match="no script"):
        script.run_script(tmp_path / "nothing.py", [], CONFIG)


@pytest.mark.parametrize(("rank", "reported"), [("", True), ("0", True), ("1", False)])
def test_only_rank_0_reports_a_script_that_never_joined(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rank: str, reported: bool
) -> None:
    """The other ranks of a process group are no workers of their own, and must not join to say that they have ended."""
    told: list[int] = []
    monkeypatch.setattr(script, "_report_without_worker", lambda error, code, config: told.append(code))
    monkeypatch.delitem(sys.modules, "workers.cluster", raising=False)
    if rank:
        monkeypatch.setenv("RANK", rank)
    assert run(tmp_path, "pass\n") == 0
    assert told == [0] * reported
