"""Threads on virtual time: one runs at a time, time passes only when all of them sleep. Deterministic."""

from __future__ import annotations

import heapq
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future

_STUCK_S = 30.0
"""Real seconds after which a wait is taken for a hang."""


class Turns:
    """A `ps.clock.Clock` that the sleeping threads drive."""

    def __init__(self) -> None:
        self._now = 0.0
        self._count = 0
        self._sleeping: list[tuple[float, int, threading.Event]] = []

    def now(self) -> float:
        """See `Clock.now`."""
        return self._now

    def wait(self, event: threading.Event, timeout_s: float) -> bool:
        """See `Clock.wait`; looks at `event` at the end only."""
        self.sleep(timeout_s)
        return event.is_set()

    def sleep(self, seconds: float) -> None:
        """Let the others go on until it is this thread's turn again, `seconds` later."""
        turn = self._queue(seconds)
        self._next()
        self._take(turn)

    def run(self, scripts: Sequence[Callable[[], object]]) -> float:
        """Run scripts side by side from time 0, each on a thread; returns when the last one ends, in virtual time."""
        results = [Future[object]() for _ in scripts]
        turns = [self._queue(0.0) for _ in scripts]
        threads = [
            threading.Thread(target=self._script, args=(script, turn, result), name=f"script-{number}")
            for number, (script, turn, result) in enumerate(zip(scripts, turns, results, strict=True))
        ]
        for thread in threads:
            thread.start()
        self._next()
        for thread, result in zip(threads, results, strict=True):
            thread.join(_STUCK_S)
            result.result(0)
        return self._now

    def _script(self, script: Callable[[], object], turn: threading.Event, result: Future[object]) -> None:
        try:
            self._take(turn)
            result.set_result(script())
        except BaseException as error:
            result.set_exception(error)
        finally:
            self._next()

    def _queue(self, seconds: float) -> threading.Event:
        turn = threading.Event()
        self._count += 1
        heapq.heappush(self._sleeping, (self._now + seconds, self._count, turn))
        return turn

    def _next(self) -> None:
        if self._sleeping:
            self._now, _, turn = heapq.heappop(self._sleeping)
            turn.set()

    def _take(self, turn: threading.Event) -> None:
        if not turn.wait(_STUCK_S):
            raise TimeoutError(f"no turn within {_STUCK_S} s")
