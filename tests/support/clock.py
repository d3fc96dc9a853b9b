"""A clock that stands still until a test moves it."""

from __future__ import annotations

import threading
import time

_STUCK_S = 30.0
"""Real seconds after which a wait on fake time is taken for a hang."""


class FakeClock:
    """`ps.clock.Clock` driven by `advance`. Thread-safe."""

    def __init__(self, now: float = 1000.0) -> None:
        self._now = now
        self._moved = threading.Condition()  # guards _now

    def now(self) -> float:
        """See `Clock.now`."""
        with self._moved:
            return self._now

    def advance(self, seconds: float) -> None:
        """Let time pass, and wake who waits for it."""
        with self._moved:
            self._now += seconds
            self._moved.notify_all()

    def wait(self, event: threading.Event, timeout_s: float) -> bool:
        """See `Clock.wait`: ends when `event` is set or fake time has passed. TimeoutError if neither ever happens."""
        stuck = time.monotonic() + _STUCK_S
        with self._moved:
            deadline = self._now + timeout_s
            while not event.is_set() and self._now < deadline:
                if time.monotonic() > stuck:
                    raise TimeoutError(f"nobody moved the fake clock for {_STUCK_S} s")
                self._moved.wait(0.005)  # an event can't wake a condition
        return event.is_set()
