"""The server's own threads: a few that apply pushes, and one that looks after deadlines."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable

import torch

from ps.clock import Clock
from ps.server.slots import Work

log = logging.getLogger(__name__)


class ApplyThreads:
    """A few named threads that take work in order. With none, work is done on the thread that brings it.

    The queue is bounded by its users: payload bytes by the host, and one request per worker and message. The threads
    share the process's intra-op threads: two that use all cores each would wait for each other inside every kernel.
    """

    def __init__(self, count: int, run: Callable[[Work], None]) -> None:
        self._run = run
        self._queue: queue.SimpleQueue[Work | None] = queue.SimpleQueue()
        self._intra_op = max(1, torch.get_num_threads() // max(1, count))
        self._threads = [
            threading.Thread(target=self._loop, name=f"ps-apply-{index}", daemon=True) for index in range(count)
        ]
        for thread in self._threads:
            thread.start()

    def put(self, work: Work) -> None:
        """Do `work`, soon. Blocks only when there are no threads."""
        if self._threads:
            self._queue.put(work)
        else:
            self._run(work)

    def close(self, timeout_s: float) -> None:
        """Finish what is queued and end the threads; idempotent. Logs a thread that doesn't end in time."""
        for _ in self._threads:
            self._queue.put(None)
        for thread in self._threads:
            thread.join(timeout_s)
            if thread.is_alive():
                log.error("%s did not end within %.0f s", thread.name, timeout_s)
        self._threads = []

    def _loop(self) -> None:
        torch.set_num_threads(self._intra_op)
        while (work := self._queue.get()) is not None:
            self._run(work)
            del work  # a payload must not live on until the next request comes


class Ticker:
    """A thread that calls `tick` when it is due. Owned by the host."""

    def __init__(self, clock: Clock, tick: Callable[[], float]) -> None:
        """`tick` does what is due and returns in how many seconds to call it again."""
        self._clock = clock
        self._tick = tick
        self._wake = threading.Event()
        self._stop = False
        self._thread = threading.Thread(target=self._loop, name="ps-ticker", daemon=True)
        self._thread.start()

    def wake(self) -> None:
        """Call `tick` now. Thread-safe, doesn't block."""
        self._wake.set()

    def close(self, timeout_s: float) -> None:
        """End the thread; idempotent."""
        self._stop = True
        self._wake.set()
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            log.error("%s did not end within %.0f s", self._thread.name, timeout_s)

    def _loop(self) -> None:
        while not self._stop:
            try:
                wait_s = self._tick()
            except Exception:
                log.exception("looking after deadlines failed; trying again")
                wait_s = 1.0
            self._clock.wait(self._wake, wait_s)
            self._wake.clear()
