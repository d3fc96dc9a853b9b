"""Child processes of the launcher: each in a session and with a log file of its own, none left behind. Torch-free."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import FrameType, TracebackType

from ps.clock import Deadline, MonotonicClock
from workers import keeper

_CLOCK = MonotonicClock()

_LINE_BYTES = 64 << 10
"""A line longer than this is shown in parts."""

KEEPER_EXIT_S = 5.0
"""Bound on the wait for the keeper, which only has to read the end of a pipe."""


class Wakeup:
    """Cuts the launcher's waits short when a signal arrives: a child's exit, Ctrl-C, SIGTERM. Main thread only.

    As a context manager it takes over SIGCHLD and `handled` signals, and puts everything back at the end.
    """

    def __init__(self, handled: Mapping[int, Callable[[int], None]]) -> None:
        self._handled = handled
        self._previous: dict[int, Callable[[int, FrameType | None], object] | int | None] = {}

    def __enter__(self) -> Wakeup:
        self._read, self._write = os.pipe()
        os.set_blocking(self._read, False)
        os.set_blocking(self._write, False)
        self._previous_fd = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        for number in (*self._handled, signal.SIGCHLD):
            self._previous[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._previous_fd)
        os.close(self._read)
        os.close(self._write)

    def wait(self, timeout_s: float) -> None:
        """Block for `timeout_s`, or until a signal has been handled."""
        select.select([self._read], [], [], max(0.0, timeout_s))
        with contextlib.suppress(BlockingIOError):
            os.read(self._read, 4096)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if number in self._handled:
            self._handled[number](number)


class Keeper:
    """The process that kills the children should this one be killed (see `workers.keeper`)."""

    def __init__(self) -> None:
        command = [sys.executable, "-I", "-S", str(Path(keeper.__file__).resolve())]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, start_new_session=True, text=True
        )

    def add(self, group: int) -> None:
        """Kill this process group when the launcher dies."""
        self._tell(f"+{group}\n")

    def remove(self, group: int) -> None:
        """The group is gone: its number may be used by others from now on."""
        self._tell(f"-{group}\n")

    def close(self) -> None:
        """End the keeper, which kills whatever is still on its list."""
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        try:
            self._process.wait(KEEPER_EXIT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(KEEPER_EXIT_S)

    def _tell(self, line: str) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):  # killed by somebody: then this net is gone, and nothing else is
            self._process.stdin.write(line)
            self._process.stdin.flush()


class Tail:
    """Reads what others append to a file, line by line. Children write to files and not to pipes, so that a terminal
    that stands still never blocks training, and the logs survive the launcher."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("rb")
        self._rest = b""

    def lines(self, *, last: bool = False) -> list[str]:
        """Lines completed since the last call; with `last` an unfinished one too."""
        data = self._rest + self._file.read()
        *done, self._rest = data.split(b"\n")
        if self._rest and (last or len(self._rest) > _LINE_BYTES):
            done.append(self._rest)
            self._rest = b""
        return [_shown(line) for line in done]

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def _shown(line: bytes) -> str:
    """What a terminal would show of a line: text after the last carriage return (progress bars redraw that way)."""
    return line.decode(errors="replace").rstrip("\r").rpartition("\r")[2]


class Child:
    """One child process. Not thread-safe: the launcher's main thread owns it."""

    def __init__(self, role: str, name: str, command: Sequence[str], env: Mapping[str, str], log: Path,
                 keeper: Keeper) -> None:  # fmt: skip
        self.role = role
        self.name = name
        self.log = log
        self.exit_code: int | None = None
        """As in `subprocess`: negative = killed by that signal. None while it runs."""
        self._keeper = keeper
        with log.open("ab") as output:
            self._process = subprocess.Popen(
                command, env=dict(env), stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True
            )
        keeper.add(self.pid)
        self.tail = Tail(log)

    @property
    def pid(self) -> int:
        """Its process id, which is also its process group's and session's."""
        return self._process.pid

    def poll(self) -> int | None:
        """Its exit code, None while it runs. What it has left in its process group is killed first: until the child
        is reaped, nobody else can have that group's number."""
        if self.exit_code is None and os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None:
            self.kill()
            self.exit_code = self._process.wait()
            self._keeper.remove(self.pid)
        return self.exit_code

    def signal(self, number: int) -> None:
        """Send a signal to the child alone, unless it is gone."""
        if self.poll() is None:
            self._process.send_signal(number)

    def kill(self) -> None:
        """SIGKILL to its whole process group."""
        if self.exit_code is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, signal.SIGKILL)

    def close(self) -> None:
        """Close the log."""
        self.tail.close()


def wait_all(children: Sequence[Child], timeout_s: float, wakeup: Wakeup) -> list[Child]:
    """Wait until all have exited, at most `timeout_s`; returns those that still run."""
    deadline = Deadline.after(_CLOCK, timeout_s)
    while left := [child for child in children if child.poll() is None]:
        if deadline.expired(_CLOCK):
            break
        wakeup.wait(min(0.1, deadline.remaining_s(_CLOCK)))
    return left


def end_all(children: Sequence[Child], wakeup: Wakeup, *, term_s: float, kill_s: float = 5.0) -> list[Child]:
    """SIGTERM, `term_s` to leave, SIGKILL to the groups, `kill_s` more; returns those that can't be killed.

    A process in uninterruptible sleep survives SIGKILL: waiting for it without a bound would hang the launcher.
    """
    left = [child for child in children if child.poll() is None]
    if left and term_s > 0:
        for child in left:
            child.signal(signal.SIGTERM)
        left = wait_all(left, term_s, wakeup)
    for child in left:
        child.kill()
    return wait_all(left, kill_s, wakeup)
