"""What the launcher shows."""

from __future__ import annotations

import io

from rich.console import Console

from ps.v1 import coordinator_pb2 as pb
from ps.v1 import types_pb2
from workers import dashboard


def status() -> pb.StatusReply:
    """A job half way through."""
    return pb.StatusReply(
        state=types_pb2.JOB_STATE_RUNNING,
        progress=pb.Progress(
            samples=500, samples_expected=1000, samples_per_s=90, samples_per_s_recent=100, epoch=1, epochs=4,
            pushes=20, staleness={0: 1, 1: 3}, workers_live=2, reported={"loss": 0.25},
        ),
    )  # fmt: skip


def test_summary_line() -> None:
    """Samples, epoch, rate, loss, staleness and workers are all on the line."""
    assert dashboard.summary_line(status()) == (
        "500/1000 samples 100/s · loss 0.250 · 2 workers · staleness 0.8 (max 1) · epoch 2/4"
    )
    assert dashboard.summary_line(None) == "starting"


def test_plain_lines() -> None:
    """Without a terminal: log lines at once, progress every few seconds."""
    stream = io.StringIO()
    with dashboard.open_dashboard(stream) as board:
        board.line("worker", "worker-0", "hello")
        board.update(status(), 1.0)
        board.update(status(), 5.5)
        board.update(status(), 6.0)
    lines = stream.getvalue().splitlines()
    assert lines[0] == "worker-0    | hello"
    assert len(lines) == 2 and "500/1000" in lines[1]


class _Broken(io.StringIO):
    def write(self, text: str) -> int:
        raise BrokenPipeError


def test_a_reader_that_has_gone_is_no_error() -> None:
    """`psctl local ... | head` must not stop the clean-up."""
    with dashboard.open_dashboard(_Broken()) as board:
        board.line("worker", "worker-0", "hello")
        board.note("stopping")


def test_live() -> None:
    """On a terminal log lines keep their text, markup signs included, above the bar."""
    console = Console(file=io.StringIO(), force_terminal=True, width=120)
    with dashboard.LiveDashboard(console) as board:
        board.line("server", "server-0", "[red]not markup[/]")
        board.update(status(), 1.0)
    assert "[red]not markup[/]" in console.file.getvalue()  # type: ignore[attr-defined]


def test_nothing_is_cut_off_on_a_narrow_terminal() -> None:
    """80 columns, a terminal's usual width, show the workers and the staleness too."""
    console = Console(file=io.StringIO(), force_terminal=True, width=80)
    with dashboard.LiveDashboard(console) as board:
        board.update(status(), 1.0)
    shown = console.file.getvalue()  # type: ignore[attr-defined]
    assert all(words in shown for words in ("2 workers", "(max 1)", "epoch 2/4")) and "…" not in shown
