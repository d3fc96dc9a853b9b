"""Waits of the real clock end when they should and never block for long at a stretch."""

from __future__ import annotations

import threading

import pytest

from ps.clock import SLICE_S, Deadline, MonotonicClock

CLOCK = MonotonicClock()


class CountingEvent(threading.Event):
    """An event that notes how long it was asked to block, and is set by the `set_after`-th wait."""

    def __init__(self, set_after: int) -> None:
        super().__init__()
        self.waits: list[float | None] = []
        self._set_after = set_after

    def wait(self, timeout: float | None = None) -> bool:
        self.waits.append(timeout)
        if len(self.waits) == self._set_after:
            self.set()
        return self.is_set()


def test_long_waits_are_sliced() -> None:
    """No single wait is longer than `SLICE_S`, so a signal that came just before it is handled soon."""
    event = CountingEvent(set_after=5)
    assert CLOCK.wait(event, 3600)
    assert event.waits == [SLICE_S] * 5


@pytest.mark.parametrize("timeout_s", [0.0, -1.0, 0.001])
def test_unset_event_ends_by_the_timeout(timeout_s: float) -> None:
    """False when nothing happened in time; a deadline that has passed does not block."""
    assert not CLOCK.wait(threading.Event(), timeout_s)


def test_set_event_needs_no_time() -> None:
    """True at once, also with no time left."""
    event = threading.Event()
    event.set()
    assert CLOCK.wait(event, 0)


def test_deadline_passes() -> None:
    """Nothing is left of a deadline in the past, and it is never negative."""
    past = Deadline.after(CLOCK, -1)
    assert past.expired(CLOCK)
    assert past.remaining_s(CLOCK) == 0
    assert not Deadline.after(CLOCK, 60).expired(CLOCK)
