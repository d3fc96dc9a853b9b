"""Random histories of a coordinator: joins, leases, acknowledgements, deaths, restarts, in any order."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, precondition, rule

from ps.control.api import DataRange, JobSettings, LeaseAsk, LeaseVerdict, StreamSpec, Verdict
from ps.control.journal import Journal
from ps.control.news import Seen
from ps.control.records import Options
from ps.control.state import CoordinatorState
from ps.errors import Fenced, JobFailed, Refused
from ps.types import Incarnation, JobState, LeaveReason, MemberState, Role
from tests.support.control import MODEL

OPTIONS = Options(servers=1, no_workers_s=1e9, settings=JobSettings(heartbeat_s=1.0, lease_s=10.0))
OUT = (Fenced, JobFailed, Refused)


class Histories(RuleBasedStateMachine):
    """Events come in any order and the invariants hold after each; acknowledged samples are remembered here."""

    ranges = Bundle("ranges")
    stream: StreamSpec
    last: str

    def __init__(self) -> None:
        super().__init__()
        # In memory where that is possible: the journal waits for the disk at each event.
        self.folder = tempfile.TemporaryDirectory(dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None)
        self.now = 0.0
        self.workers: list[Incarnation] = []
        self.servers: list[Incarnation] = []
        self.ids: set[int] = set()
        self.acknowledged: set[tuple[int, int]] = set()
        self.out: dict[tuple[int, int], Incarnation] = {}
        """(epoch, position) → the worker that processes it."""
        self.restarted = False
        self.start()

    def start(self) -> None:
        self.journal = Journal(Path(self.folder.name) / "state.db")
        self.state = CoordinatorState(self.now, OPTIONS, self.journal.start())
        self.store()

    def store(self) -> None:
        self.journal.append(self.state.records())
        self.state.validate()

    def teardown(self) -> None:
        try:
            if self.state.data.streams and not self.state.job.over:
                self.finish()
        finally:
            self.journal.close()
            self.folder.cleanup()

    def finish(self) -> None:
        """Whatever has happened: when all others are gone, one more worker gets all that is left, each sample once."""
        for worker in self.workers:
            if not self.is_out(worker):
                self.state.leave(self.now, worker, LeaveReason.DRAINED)
        if self.state.job.over:  # all scripts had ended before
            return
        self.out.clear()
        self.workers = []
        self.join(Role.WORKER)
        last_epoch = self.stream.epochs - 1
        while True:
            request = LeaseAsk(stream=0, epoch=last_epoch, batch_size=7, batches=3, last=self.last, barrier=False)
            lease = self.state.lease(self.now, self.workers[0], request)
            if lease.range is None:
                break
            positions = {(lease.range.epoch, position) for position in range(lease.range.begin, lease.range.end)}
            assert not positions & self.acknowledged
            self.acknowledged |= positions
            self.state.ack_data(self.now, self.workers[0], (lease.range,))
            self.store()
        assert lease.verdict is LeaseVerdict.STREAM_END
        assert self.state.samples == self.stream.length * self.stream.epochs
        self.state.leave(self.now, self.workers[0], LeaveReason.DONE)
        assert self.state.job.state is JobState.FINISHED

    @initialize(length=st.integers(0, 60), epochs=st.integers(1, 3), last=st.sampled_from(["merge", "short", "drop"]))
    def open(self, length: int, epochs: int, last: str) -> None:
        self.last = last
        self.stream = StreamSpec(stream=0, length=length, seed=1, epochs=epochs, shuffle=True)
        self.join(Role.SERVER)
        self.join(Role.WORKER)

    @rule(role=st.sampled_from([Role.WORKER, Role.WORKER, Role.SERVER, Role.OBSERVER]))
    def join(self, role: Role) -> None:
        try:
            joined = self.state.join(self.now, role=role, name="", host="h", pid=1, secret=b"s" * 16)
        except OUT:
            assert self.state.job.over
            return
        assert joined.incarnation not in self.ids, "an incarnation was used twice"
        self.ids.add(joined.incarnation)
        self.state.open_session(self.now, joined.incarnation)
        if role is Role.SERVER:
            self.state.ready(self.now, joined.incarnation, f"uv://h:{joined.incarnation}")
            self.servers.append(joined.incarnation)
        if role is Role.WORKER:
            self.state.open_stream(self.now, joined.incarnation, self.stream)
            self.workers.append(joined.incarnation)
        self.store()

    @precondition(lambda self: self.workers)
    @rule(
        target=ranges,
        who=st.integers(0, 9),
        epoch=st.integers(0, 3),
        batch=st.integers(1, 9),
        batches=st.integers(1, 9),
        barrier=st.booleans(),
    )
    def lease(
        self, who: int, epoch: int, batch: int, batches: int, barrier: bool
    ) -> tuple[Incarnation, DataRange] | None:
        worker = self.workers[who % len(self.workers)]
        request = LeaseAsk(stream=0, epoch=epoch, batch_size=batch, batches=batches, last=self.last, barrier=barrier)
        try:
            lease = self.state.lease(self.now, worker, request)
        except OUT:
            assert self.is_out(worker) or self.state.job.over
            return None
        self.store()
        if lease.verdict is not LeaseVerdict.RANGE:
            return None
        assert lease.range is not None
        assert sum(lease.batch_sizes) == lease.range.end - lease.range.begin
        assert len(lease.batch_sizes) <= batches
        assert max(lease.batch_sizes) < 1.5 * batch
        for position in range(lease.range.begin, lease.range.end):
            key = lease.range.epoch, position
            assert key not in self.acknowledged, "an acknowledged sample was handed out again"
            # After a restart the coordinator has forgotten who holds what: at least once, not exactly once.
            assert self.restarted or key not in self.out, "a sample is in two hands"
            self.out[key] = worker
        return worker, lease.range

    @rule(held=consumes(ranges), cut=st.integers(0, 60), late=st.booleans())
    def acknowledge(self, held: tuple[Incarnation, DataRange] | None, cut: int, late: bool) -> None:
        if held is None:
            return
        worker, part = held
        middle = min(part.begin + cut, part.end)
        done, rest = _part(part, part.begin, middle), _part(part, middle, part.end)
        try:
            self.state.ack_data(self.now, worker, done, rest)
            if late:
                self.state.ack_data(self.now, worker, done, ())  # a retry of a call whose answer was lost
        except OUT:
            assert self.is_out(worker)
            return
        self.acknowledged.update((part.epoch, position) for position in range(part.begin, middle))
        self.forget(part)
        self.store()

    @precondition(lambda self: self.workers)
    @rule(who=st.integers(0, 9), reason=st.sampled_from([LeaveReason.DRAINED, LeaveReason.DONE]), killed=st.booleans())
    def go(self, who: int, reason: LeaveReason, killed: bool) -> None:
        worker = self.workers.pop(who % len(self.workers))
        if self.is_out(worker):
            return
        member = self.state.members.get(worker)
        if killed:
            self.state.report_exit(self.now, name=member.name, pid=member.pid, exit_code=-9, final=False)
        else:
            self.state.leave(self.now, worker, reason)
        self.store()
        self.out = {key: holder for key, holder in self.out.items() if holder != worker}

    @precondition(lambda self: self.workers)
    @rule(who=st.integers(0, 9))
    def cut_off(self, who: int) -> None:
        worker = self.workers[who % len(self.workers)]
        if not self.is_out(worker):
            self.state.close_session(self.now, worker, self.state.members.get(worker).session)

    @rule(seconds=st.sampled_from([0.1, 0.5, 1.0, 9.0, 30.0]), ticks=st.integers(1, 40))
    def tick(self, seconds: float, ticks: int) -> None:
        for _ in range(ticks):
            self.now += seconds
            self.state.tick(self.now)
            self.store()
        self.out = {key: holder for key, holder in self.out.items() if not self.is_out(holder)}

    @precondition(lambda self: self.workers and self.servers)
    @rule(who=st.integers(0, 9), finish=st.booleans())
    def propose(self, who: int, finish: bool) -> None:
        worker = self.workers[who % len(self.workers)]
        try:
            proposal = self.state.propose(self.now, worker, MODEL)
            for server in self.servers:
                if not self.is_out(server):
                    seen = self.state.news(server, Seen()).seen
                    self.state.installed(self.now, server, membership=seen.membership, map_epoch=seen.map_epoch)
            if proposal.verdict is Verdict.INITIALISE and finish:
                self.state.finish_init(self.now, worker)
        except OUT:
            assert self.is_out(worker) or self.state.job.over
        self.store()

    @precondition(lambda self: self.servers)
    @rule(who=st.integers(0, 9), rarely=st.integers(0, 7))
    def lose_server(self, who: int, rarely: int) -> None:
        if rarely:
            return
        server = self.servers.pop(who % len(self.servers))
        member = self.state.members.get(server)
        held_shards = server in self.state.model.holders()
        self.state.report_exit(self.now, name=member.name, pid=member.pid, exit_code=-9, final=False)
        self.store()
        assert self.state.job.over or not held_shards

    @rule()
    def restart(self) -> None:
        before = self.snapshot()
        self.journal.close()
        generation = self.state.generation
        self.start()
        self.restarted = True
        assert self.state.generation == generation + 1
        assert self.snapshot() == before
        for member in self.state.members:
            if not member.ended:
                self.state.open_session(self.now, member.incarnation)

    @invariant()
    def nothing_is_lost(self) -> None:
        """Samples acknowledged = those that workers acknowledged, and dropped tails; all others are still to come."""
        for epoch, position in self.acknowledged:
            table = self.state.data.streams[0].epochs.get(epoch)
            assert table is None or any(begin <= position < end for begin, end in table.done)
        if self.state.data.streams and self.last != "drop":
            assert self.state.samples == len(self.acknowledged)

    def snapshot(self) -> tuple[object, ...]:
        """What a restart must not change."""
        members = [(m.incarnation, m.name, m.role, m.state, m.secret, m.address) for m in self.state.members]
        done = [[(e, list(t.done)) for e, t in sorted(s.epochs.items()) if t.done] for s in self.state.data.streams]
        job = self.state.job.record
        return members, done, self.state.model.shard_map, self.state.model.initialiser, job.state, job.workers_seen

    def is_out(self, incarnation: Incarnation) -> bool:
        member = self.state.members.find(incarnation)
        return member is None or member.state in (MemberState.LEFT, MemberState.DEAD)

    def forget(self, part: DataRange) -> None:
        for position in range(part.begin, part.end):
            self.out.pop((part.epoch, position), None)


def _part(whole: DataRange, begin: int, end: int) -> tuple[DataRange, ...]:
    if begin >= end:
        return ()
    return (DataRange(stream=whole.stream, epoch=whole.epoch, begin=begin, end=end),)


TestHistories = Histories.TestCase
TestHistories.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
