"""Monotonic time as an object, so that decisions and waits can be driven by a fake one in tests."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass
from typing import Protocol


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
        """See `Clock.wait`. On the main thread signal handlers run during the wait."""
        return event.wait(max(0.0, timeout_s))


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
