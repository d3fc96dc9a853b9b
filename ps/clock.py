"""Monotonic time as an object, so that decisions and waits can be driven by a fake one in tests."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass
from typing import Protocol

SLICE_S = 0.1
"""Longest uninterrupted wait. A signal that arrives just before a thread blocks does not end its wait: its handler
would run when the wait is over."""


class Clock(Protocol):
    """Monotonic seconds and a bounded wait. Implementations are thread-safe."""

    def now(self) -> float:
        """Monotonic seconds; only differences mean anything, and only on this host."""
        ...

    def wait(self, event: threading.Event, timeout_s: float) -> bool:
        """Block until `event` is set or `timeout_s` has passed; True if it was set."""
        ...


class MonotonicClock:
    """The real clock."""

    def now(self) -> float:
        """See `Clock.now`."""
        return time.monotonic()

    def wait(self, event: threading.Event, timeout_s: float) -> bool:
        """See `Clock.wait`. On the main thread signal handlers run during the wait, at most `SLICE_S` late."""
        deadline = Deadline.after(self, timeout_s)
        while not event.wait(min(SLICE_S, deadline.remaining_s(self))):
            if deadline.expired(self):
                return False
        return True


@dataclass(frozen=True, slots=True)
class Deadline:
    """A point in monotonic time by which something must have happened."""

    at_s: float

    @classmethod
    def after(cls, clock: Clock, timeout_s: float) -> Deadline:
        """The deadline `timeout_s` from now."""
        return cls(clock.now() + timeout_s)

    def remaining_s(self, clock: Clock) -> float:
        """Seconds left, never negative."""
        return max(0.0, self.at_s - clock.now())

    def expired(self, clock: Clock) -> bool:
        """Whether it has passed."""
        return clock.now() >= self.at_s
