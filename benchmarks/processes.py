"""Child processes of a benchmark: started with a known environment, spoken to in JSON lines, never left behind."""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FrameType, TracebackType

from ps import memory
from workers.children import Keeper

DRIVERS = Path(__file__).parent / "drivers"

ALLOCATIONS = ("tuned", "default")
"""`tuned`: the memory settings that our launchers make. `default`: torch and glibc as they come."""

EXIT_S = 20.0
"""How long a child may take to leave on its own."""


class DriverFailed(RuntimeError):
    """A child ended, or did not answer; the text holds the end of its log."""


def settings(allocation: str, threads: int = 1) -> dict[str, str]:
    """The variables that are set for every child, ours and the baselines' alike."""
    chosen = {
        "OMP_NUM_THREADS": str(threads),
        "TORCH_CPP_LOG_LEVEL": "ERROR",
        "GRPC_VERBOSITY": "ERROR",
        "PYTHONUNBUFFERED": "1",
        memory.KEEP: "1",
    }
    return chosen | (memory.settings({}) if allocation == "tuned" else {})


def environment(chosen: Mapping[str, str]) -> dict[str, str]:
    """This process's environment with `chosen`, and without what would change the memory settings or the job."""
    gone = (memory.HUGE_PAGES, memory.TUNABLES, "PS_COORDINATOR", "PS_NAME", "PS_ADVERTISE", "PS_INTERFACE")
    return {key: value for key, value in os.environ.items() if key not in gone} | dict(chosen)


def _exit(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)


class Children:
    """All children of one benchmark, and a folder for their logs. A context manager of the main thread.

    SIGTERM ends the benchmark like an error, so that children, folders and namespaces are removed.
    Should this process be killed, a keeper kills what is left.
    """

    def __init__(self, chosen: Mapping[str, str]) -> None:
        self.settings = dict(chosen)
        self._environment = environment(chosen)
        self._all: list[Child] = []

    def __enter__(self) -> Children:
        signal.signal(signal.SIGTERM, _exit)
        self._folder = tempfile.TemporaryDirectory(prefix="ps-bench-")
        self.folder = Path(self._folder.name)
        self._keeper = Keeper()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        for child in self._all:
            child.end_input()
        deadline_s = time.monotonic() + (0 if error is not None else EXIT_S)
        for child in reversed(self._all):  # workers were started last; servers and the coordinator follow them
            child.close(max(0.0, deadline_s - time.monotonic()))
        self._keeper.close()
        self._folder.cleanup()

    def python(self, *arguments: object, prefix: Sequence[str] = (), **extra: str) -> Child:
        """Start a Python child; `prefix` goes before the command, `extra` into its environment."""
        command = [*prefix, sys.executable, *map(str, arguments)]
        log = self.folder / f"{len(self._all)}.log"
        child = Child(command, self._environment | extra, log, self._keeper)
        self._all.append(child)
        return child

    def driver(self, name: str, *arguments: object, prefix: Sequence[str] = (), **extra: str) -> Child:
        """Start `drivers/<name>.py`."""
        return self.python(DRIVERS / f"{name}.py", *arguments, prefix=prefix, **extra)


class Child:
    """One child in a session of its own. Its standard output holds answers, its standard error goes to a log."""

    def __init__(self, command: Sequence[str], env: Mapping[str, str], log: Path, keeper: Keeper) -> None:
        self.command = list(command)
        self._log = log
        self._keeper = keeper
        with log.open("wb") as errors:
            self._process = subprocess.Popen(
                command, env=dict(env), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors,
                text=True, start_new_session=True,
            )  # fmt: skip
        keeper.add(self.pid)

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    def tell(self, **command: object) -> None:
        """Send a command; does not wait."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(command) + "\n")
            self._process.stdin.flush()
        except OSError:
            raise self._failed("has closed its input") from None

    def answer(self, timeout_s: float = 120.0) -> dict[str, object]:
        """The next JSON line that it prints; raises `DriverFailed` when none comes."""
        assert self._process.stdout is not None
        with selectors.DefaultSelector() as selector:
            selector.register(self._process.stdout, selectors.EVENT_READ)
            if not selector.select(timeout_s):
                raise self._failed(f"gave no answer within {timeout_s:g} s")
        line = self._process.stdout.readline()
        if not line:
            raise self._failed("ended")
        answer: dict[str, object] = json.loads(line)
        return answer

    def cpu_s(self) -> float:
        """Processor seconds it has used; 0 when it is gone. In steps of 1/100 s."""
        with contextlib.suppress(OSError):
            fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
            return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
        return 0.0

    def rss_bytes(self) -> int:
        """Its resident memory; 0 when it is gone."""
        with contextlib.suppress(OSError):
            return int(Path(f"/proc/{self.pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        return 0

    def alive(self) -> bool:
        """Whether it runs."""
        return self._process.poll() is None

    def freeze(self) -> None:
        """Stop it where it is."""
        self._signal(signal.SIGSTOP)

    def thaw(self) -> None:
        """Let it go on."""
        self._signal(signal.SIGCONT)

    def _signal(self, number: signal.Signals) -> None:
        if self.alive():  # unreaped, so nobody else can have its number
            os.kill(self.pid, number)

    def end_input(self) -> None:
        """No more commands: drivers leave, and what serves them follows."""
        self.thaw()
        with contextlib.suppress(OSError):
            if self._process.stdin is not None:
                self._process.stdin.close()

    def close(self, timeout_s: float) -> None:
        """Time to leave, then SIGKILL to its group."""
        self._wait(timeout_s)
        if self.alive():
            if timeout_s > 0:
                sys.stderr.write(f"{' '.join(self.command[-6:])} did not leave by itself and is killed\n")
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, signal.SIGKILL)
            self._wait(EXIT_S)
        if self._process.stdout is not None:
            self._process.stdout.close()
        self._keeper.remove(self.pid)

    def _wait(self, timeout_s: float) -> None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout_s)

    def _failed(self, what: str) -> DriverFailed:
        tail = "\n".join(self._log.read_text(errors="replace").splitlines()[-15:])
        return DriverFailed(f"{' '.join(self.command[-6:])} {what} (exit {self._process.poll()})\n{tail}")
