"""A `CoordinatorState` driven by hand: time stands still until told, every event is followed by `validate`."""

from __future__ import annotations

from ps.control.api import Joined, Lease, LeaseAsk, StreamSpec
from ps.control.news import Seen
from ps.control.records import Options, Record, Replay
from ps.control.state import CoordinatorState
from ps.sharding.spec import ModelSignature, ParamSpec
from ps.types import Incarnation, LeaveReason, Role

MODEL = ModelSignature(
    params=(
        ParamSpec(name="weight", shape=(64, 32), dtype="float32", group=0),
        ParamSpec(name="bias", shape=(64,), dtype="float32", group=0),
    ),
    optimizer="SGD",
)


def ask(
    *, epoch: int = 0, batch_size: int = 10, batches: int = 4, last: str = "merge", barrier: bool = False
) -> LeaseAsk:
    """A lease request with handy defaults."""
    return LeaseAsk(stream=0, epoch=epoch, batch_size=batch_size, batches=batches, last=last, barrier=barrier)


def stream(*, number: int = 0, length: int = 100, seed: int = 0, epochs: int = 1) -> StreamSpec:
    """A stream with handy defaults."""
    return StreamSpec(stream=number, length=length, seed=seed, epochs=epochs, shuffle=True)


class World:
    """A coordinator's state, the time, and all records so far."""

    def __init__(self, options: Options | None = None, replay: Replay | None = None, now: float = 100.0) -> None:
        self.now = now
        self.options = options or Options()
        self.state = CoordinatorState(self.now, self.options, replay)
        self.records: list[Record] = []

    def check(self) -> None:
        """To be called after each event."""
        self.records += self.state.records()
        self.state.topics()
        self.state.validate()

    def pass_time(self, seconds: float) -> None:
        """Let time pass, ticking as often as the coordinator does."""
        until = self.now + seconds
        while self.now < until:
            self.now = min(until, self.now + self.options.tick_s)
            self.state.tick(self.now)
            self.check()

    def join(self, role: Role, name: str = "", *, session: bool = True) -> Joined:
        """A member joins, and opens its session."""
        number = len(self.records)
        joined = self.state.join(
            self.now, role=role, name=name, host="host", pid=1000 + number, secret=number.to_bytes(16, "big")
        )
        if session:
            self.state.open_session(self.now, joined.incarnation)
        self.check()
        return joined

    def server(self, name: str = "") -> Incarnation:
        """A live server."""
        joined = self.join(Role.SERVER, name)
        self.state.ready(self.now, joined.incarnation, f"uv://host:{20000 + joined.incarnation}")
        self.install(joined.incarnation)
        self.check()
        return joined.incarnation

    def worker(self, name: str = "") -> Incarnation:
        """A live worker."""
        joined = self.join(Role.WORKER, name)
        self.state.ready(self.now, joined.incarnation, "")
        self.check()
        return joined.incarnation

    def install(self, incarnation: Incarnation) -> None:
        """A member installs all news there are."""
        seen = self.state.news(incarnation, Seen()).seen
        self.state.installed(self.now, incarnation, membership=seen.membership, map_epoch=seen.map_epoch)
        self.check()

    def lease(self, worker: Incarnation, request: LeaseAsk | None = None, number: int = 0) -> Lease:
        """A worker asks for data."""
        lease = self.state.lease(self.now, worker, request or ask(), number)
        self.check()
        return lease

    def leave(self, member: Incarnation, reason: LeaveReason = LeaveReason.DONE) -> None:
        """A member says goodbye."""
        self.state.leave(self.now, member, reason)
        self.check()

    def initialised(self, *, servers: int = 1) -> tuple[list[Incarnation], Incarnation]:
        """Servers and one worker, with the model's initial weights written."""
        holders = [self.server() for _ in range(servers)]
        worker = self.worker()
        self.state.propose(self.now, worker, MODEL)
        self.state.finish_init(self.now, worker)
        for holder in holders:
            self.install(holder)
        return holders, worker
