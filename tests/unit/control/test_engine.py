"""The engine: nobody hears of an event before it is on disk; commits in groups; waits end with the change."""

from __future__ import annotations

import asyncio
import sqlite3
import threading
from collections.abc import Awaitable, Callable

import pytest

from ps.control.engine import Engine
from ps.control.records import Options, Record, Topic
from ps.control.state import CoordinatorState
from ps.types import Role
from tests.support.clock import FakeClock


class Disk:
    """A store that can be made slow or full."""

    def __init__(self) -> None:
        self.batches: list[list[Record]] = []
        self.tries = 0
        self.full = False
        self.ready = threading.Event()
        self.ready.set()

    def append(self, records: list[Record]) -> None:
        self.tries += 1
        assert self.ready.wait(10.0)
        if self.full:
            raise sqlite3.OperationalError("database or disk is full")
        self.batches.append(records)


def run(test: Callable[[Engine, Disk, FakeClock], Awaitable[None]]) -> None:
    """Run a test on a loop of its own, with an engine that is closed afterwards."""

    async def main() -> None:
        clock, disk = FakeClock(), Disk()
        engine = Engine(CoordinatorState(clock.now(), Options()), disk, clock)
        try:
            await test(engine, disk, clock)
        finally:
            disk.full = False
            disk.ready.set()
            await engine.close()

    asyncio.run(main())


def join(engine: Engine) -> Callable[[float], object]:
    return lambda now: engine.state.join(now, role=Role.WORKER, name="", host="h", pid=1, secret=b"s" * 16)


def test_answers_wait_for_the_disk() -> None:
    """A join is not answered while its records are not stored."""

    async def test(engine: Engine, disk: Disk, clock: FakeClock) -> None:
        disk.ready.clear()
        answer = asyncio.create_task(engine.do(join(engine)))
        await until(lambda: disk.tries == 1)
        assert not answer.done()
        disk.ready.set()
        await answer
        assert [type(record).__name__ for record in disk.batches[0]] == ["IdsRecord", "MemberRecord"]

    run(test)


def test_events_during_a_commit_share_the_next_one() -> None:
    """Ten joins while the disk is busy are one more transaction, not ten."""

    async def test(engine: Engine, disk: Disk, clock: FakeClock) -> None:
        disk.ready.clear()
        first = asyncio.create_task(engine.do(join(engine)))
        await until(lambda: disk.tries == 1)
        others = [asyncio.create_task(engine.do(join(engine))) for _ in range(10)]
        await asyncio.sleep(0)
        disk.ready.set()
        await asyncio.gather(first, *others)
        assert [len(batch) for batch in disk.batches] == [2, 10]

    run(test)


def test_a_full_disk_loses_nothing() -> None:
    """The event's caller gets the error; the records are kept, in order, and stored with the next event."""

    async def test(engine: Engine, disk: Disk, clock: FakeClock) -> None:
        disk.full = True
        with pytest.raises(sqlite3.OperationalError, match="disk is full"):
            await engine.do(join(engine))
        disk.full = False
        await engine.do(join(engine))
        assert [type(record).__name__ for record in disk.batches[0]] == ["IdsRecord", "MemberRecord", "MemberRecord"]

    run(test)


def test_a_cancelled_caller_does_not_cancel_the_commit() -> None:
    """Its client went away; the others who share the transaction are answered."""

    async def test(engine: Engine, disk: Disk, clock: FakeClock) -> None:
        disk.ready.clear()
        first = asyncio.create_task(engine.do(join(engine)))
        await until(lambda: disk.tries == 1)
        second = asyncio.create_task(engine.committed())
        await asyncio.sleep(0)
        first.cancel()
        disk.ready.set()
        await second
        assert len(disk.batches) == 1

    run(test)


def test_a_poll_ends_with_the_change() -> None:
    """It looks again when its topic changes, and is not woken by others; time stands still."""

    async def test(engine: Engine, disk: Disk, clock: FakeClock) -> None:
        looks: list[bool] = []

        def attempt(now: float) -> bool | None:
            looks.append(engine.state.job.over)
            return engine.state.job.over or None

        waiting = asyncio.create_task(engine.poll(Topic.DATA, attempt, 60.0))
        await engine.do(join(engine))
        await engine.do(lambda now: engine.state.stop(now, interrupted=True, reason="x"))
        assert await waiting is True
        assert looks[-1] is True
        assert len(looks) <= 3

    run(test)


def test_a_poll_of_no_length_looks_once() -> None:
    """`wait_s` = 0 asks and returns."""

    async def test(engine: Engine, disk: Disk, clock: FakeClock) -> None:
        looks: list[float] = []

        def attempt(now: float) -> bool | None:
            looks.append(now)
            return None

        assert await engine.poll(Topic.DATA, attempt, 0.0) is None
        assert len(looks) == 1

    run(test)


async def until(condition: Callable[[], bool]) -> None:
    """Let the loop and other threads go on until a condition holds."""
    async with asyncio.timeout(10.0):
        while not condition():
            await asyncio.sleep(0.001)
