"""Children of the launcher: logs line by line, and nothing left running, also when the launcher is killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.leaks import processes_with
from tests.support.polling import assert_eventually
from workers.children import Child, Keeper, Tail, Wakeup, end_all, wait_all

SLEEPER = "import time, sys; print('up', flush=True); time.sleep(600)"
STUBBORN = (
    "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); time.sleep(600)"
)
PARENT = f"import subprocess, sys; subprocess.Popen([sys.executable, '-c', {SLEEPER!r}]); {SLEEPER}"


@pytest.fixture
def keeper() -> Iterator[Keeper]:
    """A keeper, closed at the end."""
    keeper = Keeper()
    yield keeper
    keeper.close()


@pytest.fixture
def wakeup() -> Iterator[Wakeup]:
    """Signals cut waits short."""
    with Wakeup({}) as wakeup:
        yield wakeup


def start(code: str, keeper: Keeper, folder: Path, name: str = "child") -> Child:
    """A child that runs Python code; findable by the folder's name in its environment."""
    env = {**os.environ, "MARKER": str(folder)}
    return Child("worker", name, [sys.executable, "-c", code], env, folder / f"{name}.log", keeper)


def wait_up(child: Child, lines: int = 1) -> None:
    """Wait until the child and its children have said that they are up."""
    assert_eventually(lambda: child.log.read_text().count("up") >= lines)


def test_exit_codes_and_output(keeper: Keeper, wakeup: Wakeup, tmp_path: Path) -> None:
    """A child's exit code is known once it has gone, and both its streams are in its log."""
    child = start("import sys; print('out', flush=True); sys.stderr.write('err\\n'); sys.exit(3)", keeper, tmp_path)
    assert wait_all([child], 10, wakeup) == []
    assert child.exit_code == 3
    assert child.tail.lines(last=True) == ["out", "err"]
    child.close()


def test_tail_gives_whole_lines(tmp_path: Path) -> None:
    """A line is shown when it is complete, as a terminal would show it; the last one also when it is not."""
    path = tmp_path / "log"
    path.touch()
    tail = Tail(path)
    with path.open("ab") as log:
        for data, expected in (
            (b"one\ntw", ["one"]),
            (b"o\n10%\r20%\r\n\xff\n", ["two", "20%", "\ufffd"]),
            (b"end", []),
        ):
            log.write(data)
            log.flush()
            assert tail.lines() == expected
    assert tail.lines(last=True) == ["end"]
    tail.close()


def test_sigterm_then_sigkill(keeper: Keeper, wakeup: Wakeup, tmp_path: Path) -> None:
    """SIGTERM ends who listens to it, SIGKILL the others, within the bound."""
    polite, stubborn = start(SLEEPER, keeper, tmp_path, "polite"), start(STUBBORN, keeper, tmp_path, "stubborn")
    wait_up(polite)
    wait_up(stubborn)
    assert end_all([polite, stubborn], wakeup, term_s=0.5) == []
    assert (polite.exit_code, stubborn.exit_code) == (-signal.SIGTERM, -signal.SIGKILL)
    polite.close()
    stubborn.close()


def test_children_of_children_go_too(keeper: Keeper, wakeup: Wakeup, tmp_path: Path) -> None:
    """When a child has gone, what it started and left behind is killed."""
    child = start(PARENT, keeper, tmp_path)
    wait_up(child, 2)
    assert len(processes_with(str(tmp_path))) == 2
    child.signal(signal.SIGTERM)
    assert wait_all([child], 10, wakeup) == []
    assert_eventually(lambda: processes_with(str(tmp_path)) == [])
    child.close()


class _Unkillable(Child):
    """A process in uninterruptible sleep, as seen from outside."""

    def poll(self) -> int | None:
        return None


def test_what_can_not_be_killed_is_reported(keeper: Keeper, wakeup: Wakeup, tmp_path: Path) -> None:
    """The wait for a child that survives SIGKILL is bounded, and the child is named."""
    child = _Unkillable("worker", "stuck", [sys.executable, "-c", "pass"], os.environ, tmp_path / "log", keeper)
    assert end_all([child], wakeup, term_s=0.1, kill_s=0.1) == [child]
    assert_eventually(lambda: Child.poll(child) is not None)
    child.close()


LAUNCHER = """
import sys, time
from pathlib import Path
from tests.integration.test_children import PARENT, STUBBORN, start
from workers.children import Keeper
keeper, folder = Keeper(), Path(sys.argv[1])
children = [start(PARENT, keeper, folder, "parent"), start(STUBBORN, keeper, folder, "stubborn")]
print(children[1].pid, flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize("frozen", [False, True])
def test_a_killed_launcher_takes_everything_with_it(tmp_path: Path, frozen: bool) -> None:
    """SIGKILL to the launcher: children and theirs are gone, also one that is stopped or ignores SIGTERM."""
    root = Path(__file__).parents[2]
    with subprocess.Popen(
        [sys.executable, "-c", LAUNCHER, str(tmp_path)], cwd=root, stdout=subprocess.PIPE, text=True
    ) as launcher:
        assert launcher.stdout is not None
        stubborn = int(launcher.stdout.readline())
        logs = [tmp_path / "parent.log", tmp_path / "stubborn.log"]
        assert_eventually(lambda: sum(log.read_text().count("up") for log in logs) == 3)
        if frozen:
            os.kill(stubborn, signal.SIGSTOP)
        launcher.kill()
    assert_eventually(lambda: processes_with(str(tmp_path)) == [])
