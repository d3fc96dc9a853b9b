"""What a test must not leave behind: threads, child processes, environment variables."""

from __future__ import annotations

import os
import threading
import time
from dataclasses import dataclass
from pathlib import Path

LIBRARY_THREADS = ("grpc", "ThreadPoolExecutor", "asyncio_", "pymp", "QueueFeederThread", "TMonitor")
"""Beginnings of names of Python threads that libraries keep for the life of the process."""

LIBRARY_VARIABLES = ("KMP_", "OMP_", "PYTEST_", "TORCH", "TP_SOCKET_IFNAME", "GRPC_")
"""Beginnings of environment variables that libraries set for the whole process."""


@dataclass(frozen=True)
class Running:
    """Threads and child processes of this process at one moment."""

    threads: frozenset[int]
    children: frozenset[int]

    @classmethod
    def now(cls) -> Running:
        """Those of this moment."""
        return cls(frozenset(thread.ident or 0 for thread in _threads()), frozenset(child_pids()))

    def left_since(self, settle_s: float) -> list[str]:
        """What runs now and did not then, a text each; waits up to `settle_s` for what is just ending."""
        deadline = time.monotonic() + settle_s
        while (left := self._new()) and time.monotonic() < deadline:
            threading.Event().wait(0.02)
        return left

    def _new(self) -> list[str]:
        left = [f"thread {thread.name}" for thread in _threads() if thread.ident not in self.threads]
        return left + [f"child {pid} ({command_line(pid)})" for pid in child_pids() if pid not in self.children]


def environment() -> dict[str, str]:
    """The environment without what libraries set for the whole process."""
    return {key: value for key, value in os.environ.items() if not key.startswith(LIBRARY_VARIABLES)}


def _threads() -> list[threading.Thread]:
    return [
        thread
        for thread in threading.enumerate()
        if thread is not threading.main_thread() and not thread.name.startswith(LIBRARY_THREADS)
    ]


def child_pids(parent: int | None = None) -> list[int]:
    """Children of `parent` (default: this process), zombies included; only this process's own can be told for sure."""
    parent = parent or os.getpid()
    return [pid for pid in all_pids() if _parent(pid) == parent]


def all_pids() -> list[int]:
    """Every process of this host that can be seen."""
    return [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]


def command_line(pid: int) -> str:
    """Its command line, empty when it has gone or is a zombie."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    except OSError:
        return ""


def processes_with(marker: str) -> list[str]:
    """Command lines of running processes whose environment or command line holds `marker`, this process excepted."""
    found = []
    for pid in all_pids():
        if pid == os.getpid():
            continue
        try:
            environment = Path(f"/proc/{pid}/environ").read_bytes().decode(errors="replace")
        except OSError:
            continue
        command = command_line(pid)
        if marker in command or marker in environment:
            found.append(f"{pid}: {command}")
    return found


def _parent(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except (OSError, IndexError, ValueError):
        return 0
