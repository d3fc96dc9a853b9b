"""The coordinator's tables, and the changes that touch several of them: a member ends, the job ends, a restart."""

from __future__ import annotations

import logging

from ps.consistency.parse import choice
from ps.control.api import DataRange, Lease
from ps.control.data_shards import DataShards
from ps.control.job import Job, Workers
from ps.control.membership import Member, Members, NameTaken
from ps.control.progress import Rates
from ps.control.records import DoneRecord, Options, Record, Replay, Topic
from ps.control.rulings import Rulings
from ps.control.shard_map import ModelTable
from ps.errors import JobFailed, Refused
from ps.types import Incarnation, JobState, MemberState, Part, Role

logger = logging.getLogger(__name__)


class Tables:
    """Members, model, job and data of one job, kept consistent with each other. Not thread-safe."""

    def __init__(self, now: float, options: Options, replay: Replay | None = None) -> None:
        replay = replay or Replay()
        self.options = options
        self.generation = replay.generation
        self._records: list[Record] = []
        self._topics: dict[Topic, None] = {}
        self._emit = self._records.append
        self._now = now
        self._last_tick: float | None = None
        self.members = Members(
            replay, lease_s=options.settings.lease_s, max_members=options.max_members, emit=self._emit
        )
        self.model = ModelTable(self._emit)
        self.job = Job(now, replay.job, options, self._emit)
        self.data = DataShards(self._on_done)
        self.numbers = dict(replay.numbers)
        self.rates = Rates()
        self.rulings = Rulings()
        self._choice = choice(options.settings.consistency)
        self._leases: dict[Incarnation, tuple[int, Lease]] = {}
        """Last range given to each worker and the request it answered."""
        self._adopt(now, replay)

    @property
    def samples(self) -> int:
        """Acknowledged samples; without any data stream, what workers say they have processed."""
        if self.data.streams:
            return self.data.samples
        return self.members.retired.samples + sum(m.worker.samples for m in self.members if m.role is Role.WORKER)

    def records(self) -> list[Record]:
        """Records since the last call; to be stored, in order and together."""
        taken, self._records[:] = list(self._records), []
        return taken

    def topics(self) -> list[Topic]:
        """Topics that changed since the last call."""
        taken, self._topics = list(self._topics), {}
        return taken

    def validate(self) -> None:
        """Assert all invariants; tests call it after every event."""
        self.members.validate()
        self.model.validate()
        self.data.validate()
        present = {m.incarnation for m in self.members if not m.ended}
        assert self.data.holders() <= present, (self.data.holders(), present)
        assert set(self._leases) <= present
        if not self.job.over:
            assert set(self.model.holders()) <= present, "the map names a server that is gone"
            assert self.model.initialiser is None or self.model.initialiser in present
        assert not self.job.record.released or self.job.over

    def _adopt(self, now: float, replay: Replay) -> None:
        for record in replay.members:
            self.members.adopt(now, record)
        if replay.map is not None:
            self.model.adopt(replay.map)
        for spec in replay.streams:
            self.data.open(spec)
        for part in replay.done:
            self.data.streams[part.stream].finish(part.epoch, part.begin, part.end)
        if replay.members:
            logger.info("generation %d: %d members taken over", self.generation, len(replay.members))

    def _begin(self, now: float) -> None:
        assert now >= self._now, (now, self._now)
        self._now = now

    def _settle(self, now: float, *topics: Topic) -> None:
        self._topics.update(dict.fromkeys(topics))
        self._agree_on_clocks()
        if self.job.over:
            return
        ended = [m for m in self.members if m.role is Role.WORKER and m.ended]
        workers = Workers(
            present=len(self.members.present(Role.WORKER)),
            may_come=any(m.replaced for m in ended),
            streams=len(self.data.streams),
            data_complete=self.data.complete,
            samples=self.data.samples,
            samples_expected=self.data.samples_expected,
        )
        self.job.check(now, workers)
        if self.job.over:
            self._announce_end()

    def _member(self, now: float, incarnation: Incarnation) -> Member:
        self._begin(now)
        member = self.members.get(incarnation)
        self.members.touch(now, member)
        return member

    def _active(self, now: float, incarnation: Incarnation) -> Member:
        member = self._member(now, incarnation)
        self._refuse_when_over()
        return member

    def _refuse_when_over(self) -> None:
        if not self.job.over:
            return
        record = self.job.record
        text = f"the job is over ({record.state.value}): {record.reason}"
        raise Refused(text) if record.state is JobState.FINISHED else JobFailed(text)

    def _free(self, now: float, name: str) -> None:
        """Make a name free, if its owner may be taken for dead."""
        owner = self.members.named(name) if name else None
        if owner is None or owner.ended:
            return
        if owner.session:
            raise NameTaken(f"the name {name!r} belongs to {owner}, which is alive; choose another one")
        # Its session is gone and a process of the same name has come: its supervisor has started it again.
        self._end(now, owner, MemberState.DEAD, "replaced by a new process of the same name", done=False)

    def _make_live(self, member: Member, why: str, address: str = "") -> None:
        if self.members.make_live(member, why, address):
            logger.info("%s is live: %s", member, why)
            if member.role is Role.WORKER:
                self.job.worker_live()

    def _come_in(self, member: Member) -> None:
        """Servers count a worker, from a clock that is agreed on first where clocks matter."""
        if member.part in (Part.OUT, Part.KEPT):
            self.members.change_part(member, Part.IN if self._choice.first is None else Part.ENTERING)
        self._topics[Topic.MEMBERS] = None

    def _agree_on_clocks(self) -> None:
        """Set the first clocks of workers that every server has been asked about."""
        for member in self.members.entering():
            assert self._choice.first is not None
            entries = [entry for server in self.members.live(Role.SERVER) for entry in server.entries]
            clock = self._choice.first(entries)
            self.members.change_part(member, Part.IN, clock)
            logger.info("%s counts from clock %d on", member, clock)
            self._topics[Topic.MEMBERS] = None

    def _end(
        self, now: float, member: Member, state: MemberState, reason: str, *, done: bool, final: bool = False
    ) -> None:
        """A member left or is dead: what it held goes to others."""
        self.members.end(member, state, reason)
        self._topics.update(dict.fromkeys(Topic))
        requeued = self.data.requeue(member.incarnation)
        self._leases.pop(member.incarnation, None)
        logger.info("%s %s: %s%s", member, state.value, reason, f"; {requeued} samples requeued" if requeued else "")
        if self.model.initialiser == member.incarnation:
            self.model.appoint(None)
        if member.role is Role.WORKER:
            if member.was_live or done:
                self.job.worker_ended(done=done)
            elif final:
                self.job.worker_lost()
        if member.incarnation in self.model.holders():
            # There is no second copy of its shards.
            self._finish(now, JobState.FAILED, f"{member}, which held shards of the model, is gone: {reason}", 1)

    def _finish(self, now: float, state: JobState, reason: str, exit_code: int = 0) -> None:
        if not self.job.over:
            self.job.end(now, state, reason, exit_code)
            self._announce_end()

    def _announce_end(self) -> None:
        self._topics.update(dict.fromkeys(Topic))
        logger.info("the job is over: %s: %s", self.job.state.value, self.job.record.reason)

    def _server_gone_for_good(self, now: float, what: str) -> None:
        """No process will follow a server: without enough of them the model can never be placed."""
        if self.model.shard_map is None and len(self.members.present(Role.SERVER)) < self.options.servers:
            self._finish(now, JobState.FAILED, f"{what} before the model was placed", 1)

    def _on_done(self, part: DataRange, completes_epoch: bool) -> None:
        elapsed_s = self.job.elapsed_s(self._now)
        if completes_epoch:
            length = self.data.streams[part.stream].spec.length
            part = DataRange(stream=part.stream, epoch=part.epoch, begin=0, end=length)
        self._emit(DoneRecord(range=part, whole_epoch=completes_epoch, elapsed_s=elapsed_s))
