"""What `psctl local` shows while a job runs: log lines with a role prefix, and its progress. Torch-free.

On a terminal the progress is a live bar under the log lines; elsewhere it is a plain line every few seconds.
"""

from __future__ import annotations

import contextlib
import sys
from types import TracebackType
from typing import Protocol, TextIO

from rich.console import Console
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TimeElapsedColumn
from rich.table import Column
from rich.text import Text

from ps.v1 import types_pb2
from ps.v1.coordinator_pb2 import StatusReply

PLAIN_EVERY_S = 5.0
"""Seconds between two progress lines where there is no terminal."""

COLOURS = {"coordinator": "magenta", "server": "cyan", "worker": "green", "export": "yellow"}

_STATES = {
    types_pb2.JOB_STATE_WAITING: "waiting",
    types_pb2.JOB_STATE_FINISHED: "finished",
    types_pb2.JOB_STATE_FAILED: "failed",
    types_pb2.JOB_STATE_INTERRUPTED: "interrupted",
}


class Dashboard(Protocol):
    """Where the launcher's output goes. Not thread-safe. Output errors never reach the launcher."""

    def line(self, role: str, name: str, text: str) -> None:
        """Show a log line of a child."""
        ...

    def note(self, text: str, *, style: str = "") -> None:
        """Show a line of the launcher itself."""
        ...

    def update(self, status: StatusReply | None, elapsed_s: float) -> None:
        """Show the newest progress; None: nothing is known yet."""
        ...

    def __enter__(self) -> Dashboard: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None
    ) -> None: ...


def open_dashboard(stream: TextIO | None = None) -> Dashboard:
    """A live dashboard when `stream` (default: stdout) is a terminal, else a plain one."""
    stream = stream or sys.stdout
    console = Console(file=stream, highlight=False, soft_wrap=True)
    return LiveDashboard(console) if console.is_terminal and not console.is_dumb_terminal else PlainDashboard(stream)


def staleness(histogram: dict[int, int]) -> tuple[float, int]:
    """Mean and maximum of a histogram {staleness in versions: number of pushes}; (0, 0) when empty."""
    count = sum(histogram.values())
    if not count:
        return 0.0, 0
    return sum(value * times for value, times in histogram.items()) / count, max(histogram)


def summary_line(status: StatusReply | None) -> str:
    """The job's progress on one line, without its bar."""
    if status is None:
        return "starting"
    progress = status.progress
    parts = [] if status.state == types_pb2.JOB_STATE_RUNNING else [_STATES.get(status.state, "?")]
    rate = f" {progress.samples_per_s_recent or progress.samples_per_s:.0f}/s" if progress.pushes else ""
    if progress.samples_expected:
        parts.append(f"{progress.samples}/{progress.samples_expected} samples{rate}")
    if "loss" in progress.reported:
        parts.append(f"loss {progress.reported['loss']:.3f}")
    parts.append(f"{progress.workers_live} worker{'s' * (progress.workers_live != 1)}")
    if progress.pushes:
        mean, top = staleness(dict(progress.staleness))
        parts.append(f"staleness {mean:.1f} (max {top})")
    if progress.samples_expected:
        parts.append(f"epoch {min(progress.epoch + 1, progress.epochs)}/{progress.epochs}")
    return " · ".join(parts)


class PlainDashboard:
    """Lines only, each flushed; a broken pipe silences it for good."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._next_s = PLAIN_EVERY_S

    def line(self, role: str, name: str, text: str) -> None:
        """See `Dashboard.line`."""
        self._print(f"{name:<11} | {text}")

    def note(self, text: str, *, style: str = "") -> None:
        """See `Dashboard.note`."""
        self._print(text)

    def update(self, status: StatusReply | None, elapsed_s: float) -> None:
        """See `Dashboard.update`."""
        if elapsed_s >= self._next_s:
            self._next_s = elapsed_s + PLAIN_EVERY_S
            self._print(f"[{elapsed_s:5.1f} s] {summary_line(status)}")

    def _print(self, text: str) -> None:
        with contextlib.suppress(OSError, ValueError):
            print(text, file=self._stream, flush=True)

    def __enter__(self) -> PlainDashboard:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        pass


class _Summary(ProgressColumn):
    """The text beside the bar; on two lines where the terminal is narrow, so that nothing is cut off."""

    def render(self, task: Task) -> Text:
        return Text(str(task.fields.get("text", "")), style="cyan")


class LiveDashboard:
    """A bar that redraws itself under the log lines."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._progress = Progress(
            BarColumn(bar_width=8),
            _Summary(Column(ratio=1)),
            TimeElapsedColumn(),
            console=console,
            refresh_per_second=4,
            transient=True,
            expand=True,
        )
        self._task = self._progress.add_task("job", total=None, text="starting")

    def line(self, role: str, name: str, text: str) -> None:
        """See `Dashboard.line`."""
        self._print(Text.assemble((f"{name:<11} │ ", COLOURS.get(role, "white")), text))

    def note(self, text: str, *, style: str = "") -> None:
        """See `Dashboard.note`."""
        self._print(Text(text, style=style))

    def update(self, status: StatusReply | None, elapsed_s: float) -> None:
        """See `Dashboard.update`."""
        total = status.progress.samples_expected if status else 0
        done = status.progress.samples if status else 0
        self._progress.update(self._task, total=total or None, completed=done, text=summary_line(status))

    def _print(self, text: Text) -> None:
        with contextlib.suppress(OSError, ValueError):
            self._console.print(text)

    def __enter__(self) -> LiveDashboard:
        self._progress.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        with contextlib.suppress(OSError, ValueError):
            self._progress.stop()
