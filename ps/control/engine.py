"""`CoordinatorState` on an event loop: real time, records on disk before anybody hears of them, and wake-ups.

All events run on the loop's thread, one at a time. Records are committed in groups by one thread of its own, so that a
slow disk delays answers and not the loop.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol, TypeVar

from ps.clock import Clock
from ps.control.records import Record, Topic
from ps.control.state import CoordinatorState

logger = logging.getLogger(__name__)

T = TypeVar("T")

MAX_WAIT_S = 10.0
"""Longest time that a call is held; who wants to wait longer asks again."""


class Store(Protocol):
    """Where records go; `Journal` is one."""

    def append(self, records: list[Record]) -> None:
        """Store all or none, durably; called on the commit thread."""
        ...


class Engine:
    """Runs events. Belongs to one event loop; `close` ends its thread."""

    def __init__(self, state: CoordinatorState, store: Store, clock: Clock) -> None:
        self.state = state
        self._store = store
        self._clock = clock
        self._commits = ThreadPoolExecutor(max_workers=1, thread_name_prefix="ps-journal")
        self._pending: list[Record] = []
        self._emitted = 0
        self._stored = 0
        self._writing: asyncio.Task[None] | None = None
        self._changed = {topic: asyncio.Event() for topic in Topic}
        self.pokes: dict[int, asyncio.Event] = {}
        """Session token → its event, set when there may be news."""

    def now(self) -> float:
        """Monotonic seconds, as the state takes them."""
        return self._clock.now()

    async def do(self, event: Callable[[float], T]) -> T:
        """Run an event at the present time; back when its records are on disk."""
        try:
            result = event(self.now())
        finally:
            self._collect()
        await self.committed()
        return result

    async def poll(self, topic: Topic, attempt: Callable[[float], T | None], wait_s: float) -> T | None:
        """Run `attempt` until it gives something, again whenever `topic` changes, for at most `wait_s`."""
        until = self.now() + min(wait_s, MAX_WAIT_S)
        while True:
            changed = self._changed[topic]
            result = await self.do(attempt)
            left_s = until - self.now()
            if result is not None or left_s <= 0:
                return result
            await wait_event(changed, left_s)

    async def committed(self) -> None:
        """Back when all records emitted so far are on disk. Raises `sqlite3.Error` when they can't be written."""
        goal = self._emitted
        while self._stored < goal:
            if self._writing is None:
                self._writing = asyncio.create_task(self._write())
            # Shielded: the batch belongs to all who wait for it, not to the one whose call was cancelled.
            await asyncio.shield(self._writing)

    async def close(self) -> None:
        """Write what is pending and end the commit thread."""
        try:
            await self.committed()
        finally:
            self._commits.shutdown()

    def _collect(self) -> None:
        records = self.state.records()
        self._pending.extend(records)
        self._emitted += len(records)
        topics = self.state.topics()
        for topic in topics:
            self._changed[topic].set()
            self._changed[topic] = asyncio.Event()
        if any(topic is not Topic.DATA for topic in topics):
            for poke in self.pokes.values():
                poke.set()

    async def _write(self) -> None:
        batch, self._pending = self._pending, []
        try:
            await asyncio.get_running_loop().run_in_executor(self._commits, self._store.append, batch)
        except BaseException:
            # Kept for the next try: the state has moved on and can't take them back.
            self._pending[:0] = batch
            raise
        else:
            self._stored += len(batch)
        finally:
            self._writing = None


async def wait_event(event: asyncio.Event, timeout_s: float) -> bool:
    """Wait for an event; True if it was set in time."""
    try:
        await asyncio.wait_for(event.wait(), timeout_s)
    except TimeoutError:
        return False
    return True
