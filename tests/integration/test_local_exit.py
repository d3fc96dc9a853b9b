"""How `psctl local` ends: exit codes, the user's traceback last and once, Ctrl-C once and twice, a killed launcher."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from tests.support import train
from tests.support.cluster import Local, run_psctl
from tests.support.leaks import processes_with
from tests.support.polling import assert_eventually

SCRIPT = Path(train.__file__)


def test_script_that_raises(tmp_path: Path) -> None:
    """Exit code 1; the traceback, from the user's own file down, comes last and only once; the job has failed."""
    arguments = [str(tmp_path), "--raise-step=2"]
    with Local(SCRIPT, tmp_path, workers=2, arguments=arguments) as local:
        assert local.wait() == 1
    shown = local.out + local.err
    assert shown.count("Traceback (most recent call last)") == 1
    lines = local.err.splitlines()
    assert lines[0] == "Traceback (most recent call last):"
    assert lines[1].strip().startswith(f'File "{SCRIPT}", line ')
    assert lines[-1] == "ValueError: raised by the script"
    assert "ValueError: raised by the script" in local.log("worker-0") + local.log("worker-1")
    summary = local.summary()
    assert summary["outcome"] == "failed" and "ValueError: raised by the script" in summary["reason"]


def test_exit_code_of_the_script(tmp_path: Path) -> None:
    """`sys.exit(3)` in a script that never joins is the launcher's exit code, and the others are stopped."""
    script = (
        "import os, sys, threading\n"
        "if os.environ['PS_NAME'] == 'worker-1': sys.exit(3)\n"
        "import workers\n"
        "with workers.join() as worker:\n"
        "    while True:\n"
        "        threading.Event().wait(0.05)\n"
        "        worker.report(x=1)\n"
    )
    with Local(script, tmp_path, workers=2) as local:
        assert local.wait() == 3, local.out + local.err
    assert local.summary()["outcome"] == "failed"
    assert "Traceback" not in local.out + local.err
    assert local.err.strip() == "worker-1: exit code 3"


@pytest.mark.parametrize(
    ("script", "code", "last"),
    [
        ("def f(:\n", 1, "SyntaxError: invalid syntax"),
        ("import sys; sys.exit('no data')\n", 1, "no data"),
        ("import os; os._exit(7)\n", 7, None),
        ("print('nothing joined')\n", 0, None),
    ],
)
def test_scripts_without_a_job(tmp_path: Path, script: str, code: int, last: str | None) -> None:
    """Scripts that end before they join anything: their codes count just the same."""
    with Local(script, tmp_path) as local:
        assert local.wait() == code, local.out + local.err
    assert local.summary()["outcome"] == ("failed" if code else "finished")
    if last is not None:
        assert local.err.splitlines()[-1] == last


def test_script_is_run_as_python_would(tmp_path: Path) -> None:
    """Arguments, `__main__`, the script's folder on sys.path, and processes that it spawns itself."""
    (tmp_path / "helper.py").write_text("def double(x): return 2 * x\n")
    script = (
        "import multiprocessing, os, sys\n"
        "import helper\n"
        "def quadruple(x): return helper.double(helper.double(x))\n"
        "if __name__ == '__main__':\n"
        "    assert sys.argv[1:] == ['--servers', '5', 'a b'], sys.argv\n"
        "    assert sys.path[0] == os.path.dirname(os.path.realpath(__file__)), sys.path\n"
        "    with multiprocessing.get_context('spawn').Pool(1) as pool:\n"
        "        print('answer', pool.apply(quadruple, (10,)))\n"
    )
    with Local(script, tmp_path, arguments=["--servers", "5", "a b"]) as local:
        assert local.wait() == 0, local.out + local.err
    assert "answer 40" in local.log("worker-0")


def test_wrong_command_lines(tmp_path: Path) -> None:
    """A missing script, wrong numbers and a used run folder: exit code 2 and one line that says what is wrong."""
    (tmp_path / "script.py").touch()
    (tmp_path / "used").mkdir()
    (tmp_path / "used" / "summary.json").touch()
    for arguments, message in (
        (["local", "nothing.py"], "no script"),
        (["local", "--workers=0", "script.py"], "must be at least 1"),
        (["local", "--consistency=magic", "script.py"], "not available"),
        (["local", "--run-dir=used", "script.py"], "already holds a run"),
    ):
        done = run_psctl(arguments, tmp_path)
        assert done.process.returncode == 2, done.err
        assert message in done.err and len(done.err.splitlines()) == 1
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupted_once(tmp_path: Path, number: int) -> None:
    """The first signal lets workers finish their step and leave; the weights are saved; exit code 130."""
    with Local(SCRIPT, tmp_path, workers=2, arguments=[str(tmp_path), "--step-s=0.05"]) as local:
        local.wait_until(lambda s: s["progress"]["pushes"] >= 4)
        local.signal(number)
        assert local.wait() == 130, local.out + local.err
    assert local.summary()["outcome"] == "interrupted"
    assert (local.run_dir / "model.safetensors").exists()
    assert local.summary()["samples"] > 0
    assert "Traceback" not in local.out + local.err


def test_interrupted_twice(tmp_path: Path) -> None:
    """The second signal kills at once what does not leave by itself."""
    with Local(SCRIPT, tmp_path, workers=1, arguments=[str(tmp_path), "--wait-worker=worker-0"]) as local:
        assert_eventually((tmp_path / "waiting").exists)
        local.signal(signal.SIGINT)
        assert_eventually(lambda: "stopping" in local.out)
        local.signal(signal.SIGINT)
        assert local.wait(20) == 130
    assert local.summary()["outcome"] == "interrupted"


def test_interrupted_at_the_start(tmp_path: Path) -> None:
    """Ctrl-C before anything trains ends it just as well."""
    with Local(SCRIPT, tmp_path, workers=1, arguments=[str(tmp_path)]) as local:
        assert_eventually(lambda: (local.run_dir / "logs" / "coordinator.log").exists())
        local.signal(signal.SIGINT)
        assert local.wait(60) == 130, local.out + local.err
    assert local.summary()["outcome"] == "interrupted"


def test_launcher_killed(tmp_path: Path) -> None:
    """SIGKILL to the launcher in the middle of training: everything it has started is gone soon."""
    arguments = [str(tmp_path), "--wait-worker=worker-0", "--samples=100000"]  # more than the other one can take alone
    with Local(SCRIPT, tmp_path, workers=2, arguments=arguments) as local:
        assert_eventually((tmp_path / "waiting").exists)
        assert len(processes_with(str(tmp_path))) >= 5
        os.kill(local.process.pid, signal.SIGKILL)
        local.wait()
        assert_eventually(lambda: processes_with(str(tmp_path)) == [], timeout_s=10)
