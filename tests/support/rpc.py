"""RPC for tests: the one agent of the test process, and servers in processes of their own."""

from __future__ import annotations

import functools
import os
import selectors
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

from ps.clock import Deadline, MonotonicClock
from ps.rpc.agent import RpcTransport, open_rpc
from ps.types import Incarnation

ROOT = Path(__file__).parents[2]
CLOCK = MonotonicClock()


def within(timeout_s: float = 60.0) -> Deadline:
    """A deadline from now."""
    return Deadline.after(CLOCK, timeout_s)


@functools.cache
def client() -> RpcTransport:
    """The transport of this process: torch allows one agent per process life, so tests share it. Closed at exit."""
    return open_rpc(incarnation=Incarnation(9000), name="tests", host_ip="127.0.0.1")


def eventually(condition: Callable[[], bool], timeout_s: float = 60.0) -> None:
    """Ask until it holds; each question should itself wait for something, such as an answer."""
    deadline = within(timeout_s)
    while not condition():
        assert not deadline.expired(CLOCK), "did not come true"


class Child:
    """A Python child process; a context manager that leaves nothing behind. Standard error is kept for the tests."""

    def __init__(self, *arguments: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, *arguments],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT,
            env={**os.environ, "PYTHONUNBUFFERED": "1"},
        )  # fmt: skip

    def line(self, timeout_s: float = 90.0) -> str:
        """The next line of its standard output."""
        assert self.process.stdout is not None
        with selectors.DefaultSelector() as selector:
            selector.register(self.process.stdout, selectors.EVENT_READ)
            if not selector.select(timeout_s):
                raise AssertionError(f"no line within {timeout_s} s")
        return self.process.stdout.readline().strip()

    def signal(self, number: signal.Signals) -> None:
        """Send a signal; a stop has taken effect when this returns."""
        self.process.send_signal(number)
        stat = Path(f"/proc/{self.process.pid}/stat")
        while number == signal.SIGSTOP and stat.read_text().rpartition(")")[2].split()[0] != "T":
            threading.Event().wait(0.001)

    def finish(self, timeout_s: float = 90.0) -> tuple[int, str, str]:
        """Close its standard input and wait: exit code, rest of standard output, standard error."""
        out, err = self.process.communicate(timeout=timeout_s)
        return self.process.returncode, out, err

    def __enter__(self) -> Child:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.communicate(timeout=20)
