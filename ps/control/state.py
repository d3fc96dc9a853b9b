"""The coordinator's state machine: events in, records and answers out.

`CoordinatorState` is synchronous and pure: it has no clock (`now` is an argument, monotonic seconds), no sockets, no
randomness (secrets and nonces are arguments). After each event the caller takes `records()`, which must be on disk
before anybody hears of the event, and `topics()`, which tells whom to wake. Members are not sent messages: each session
asks for `news` since what it has seen, so that a slow one holds up nobody and a new one misses nothing.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping

from ps.consistency.policy import Ruling
from ps.control.api import (
    DataRange,
    Joined,
    Lease,
    LeaseAsk,
    LeaseVerdict,
    Proposal,
    ServerPeer,
    ServerProgress,
    ShardMap,
    StreamSpec,
    Verdict,
    WorkerProgress,
)
from ps.control.news import News, Seen, news
from ps.control.records import NumberRecord, StreamRecord, Topic
from ps.control.tables import Tables
from ps.errors import Refused, WireError
from ps.sharding.spec import ModelSignature
from ps.types import Incarnation, JobState, LeaveReason, MemberState, Part, Role

logger = logging.getLogger(__name__)

MAX_NUMBERS = 1000
"""Names that scripts may report."""


class CoordinatorState(Tables):
    """All that the coordinator knows and decides. Not thread-safe; see the module's docstring.

    Methods that take an incarnation raise `Fenced` for one that is not, or no longer, a member. Whoever asks anything
    new of a job that is over gets `JobFailed` or `Refused`.
    """

    def join(
        self,
        now: float,
        *,
        role: Role,
        name: str,
        host: str,
        pid: int,
        secret: bytes,
        nonce: bytes = b"",
        runs: str = "",
    ) -> Joined:
        """A process becomes a member. `secret` is fresh; `nonce` is the same for each retry of one request.

        `runs`: its torch version and CPU capability, for a warning when members differ.
        """
        self._begin(now)
        if role not in (Role.SERVER, Role.WORKER, Role.OBSERVER):
            raise WireError(f"role {role.value} can't join")
        member = self.members.with_nonce(nonce)
        if member is None:
            if role is not Role.OBSERVER or self.job.record.released:
                self._refuse_when_over()
            self._free(now, name)
            member = self.members.join(now, role=role, name=name, host=host, pid=pid, secret=secret, nonce=nonce)
            member.runs = runs
            logger.info("%s joined", member)
            other = next((m for m in self.members if m.runs and runs and m.runs != runs and not m.ended), None)
            if other is not None:
                logger.warning(
                    "%s runs %s, but %s runs %s: results may differ in bits", member, runs, other, other.runs
                )
        self._settle(now, Topic.MEMBERS)
        return Joined(
            incarnation=member.incarnation, name=member.name, secret=member.secret, generation=self.generation,
            settings=self.options.settings,
        )  # fmt: skip

    def open_session(self, now: float, incarnation: Incarnation) -> int:
        """A member's session began; returns its token. An older session of the same member is over with this."""
        member = self._member(now, incarnation)
        token = self.members.open_session(member)
        self._settle(now, Topic.MEMBERS)
        return token

    def close_session(self, now: float, incarnation: Incarnation, token: int) -> None:
        """A session was lost: from here on only the lease keeps the member in."""
        self._begin(now)
        member = self.members.find(incarnation)
        if member is not None and member.session == token:
            member.session = 0

    def heartbeat(self, now: float, incarnation: Incarnation, progress: WorkerProgress | ServerProgress | None) -> None:
        """A member lives, and tells how far it is."""
        member = self._member(now, incarnation)
        if isinstance(progress, WorkerProgress) and member.role is Role.WORKER:
            member.worker = progress
        if isinstance(progress, ServerProgress) and member.role is Role.SERVER:
            member.server = progress

    def installed(
        self,
        now: float,
        incarnation: Incarnation,
        *,
        membership: int = 0,
        map_epoch: int = 0,
        entries: tuple[int, ...] = (),
    ) -> None:
        """A member has put these versions in force; servers say at which clocks ENTERING workers count there."""
        member = self._member(now, incarnation)
        member.entries = entries
        member.seen_membership = max(member.seen_membership, min(membership, self.members.version))
        member.seen_map = max(member.seen_map, min(map_epoch, self.model.epoch))
        self._settle(now, Topic.MEMBERS, Topic.MODEL)

    def rule(self, now: float, incarnation: Incarnation, rulings: tuple[Ruling, ...]) -> None:
        """A server's shard has decided something for all shards."""
        member = self._member(now, incarnation)
        if member.role is not Role.SERVER:
            raise Refused(f"{member} is no server and decides nothing")
        if self.rulings.add(rulings):
            self._settle(now, Topic.MEMBERS)

    def ready(self, now: float, incarnation: Incarnation, address: str) -> None:
        """A member's RPC agent runs; servers give its address. Then wait for `known`."""
        member = self._member(now, incarnation)
        if member.role is Role.SERVER and not _dialable(address):
            raise WireError(f"{member} announced the address {address!r}, which nobody can dial")
        self._make_live(member, "ready", address)
        if member.role is Role.WORKER:
            self._come_in(member)
        self._settle(now, Topic.MEMBERS, Topic.MODEL, Topic.DATA)

    def take_part(self, now: float, incarnation: Incarnation, part: bool) -> None:
        """A worker steps aside, or comes back; then wait for `known`."""
        member = self._active(now, incarnation)
        if member.role is not Role.WORKER or member.state is not MemberState.LIVE:
            raise Refused(f"{member} is no live worker, and takes no part in clocks and rounds")
        if part:
            self._come_in(member)
        elif not part and member.part is not Part.OUT and self.job.record.gate_open:
            # While the gate is closed nobody has data, and all that wait are to begin together.
            self.members.change_part(member, Part.OUT)
        self._settle(now, Topic.MEMBERS)

    def known(self, incarnation: Incarnation) -> int | None:
        """Membership version with which every live server knows this member; None = not yet."""
        member = self.members.get(incarnation)
        return self.members.version if self.members.known_to_servers(member) else None

    def propose(self, now: float, incarnation: Incarnation, signature: ModelSignature) -> Proposal:
        """A worker shows its model. Raises `ModelMismatch`, or a `ModelError` for one that can't be sharded."""
        member = self._active(now, incarnation)
        self.model.check(signature)
        servers = self.members.live(Role.SERVER)
        if self.model.shard_map is None:
            if len(servers) < self.options.servers:
                return _wait(f"{len(servers)} of {self.options.servers} servers are there")
            peers = [ServerPeer(incarnation=m.incarnation, name=m.name, address=m.address) for m in servers]
            self.model.place(signature, self.options.settings.shard_bytes, peers)
            logger.info("model of %d parameters placed on %d server(s)", len(signature.params), len(peers))
        if member.role is Role.WORKER and not self.model.ready and self.model.initialiser is None:
            self.model.appoint(incarnation)
            logger.info("%s writes the initial weights", member)
        self._settle(now, Topic.MODEL)
        return self._proposal(incarnation)

    def finish_init(self, now: float, incarnation: Incarnation) -> None:
        """The initial weights are written. Then wait for `map_in_force`."""
        self._active(now, incarnation)
        self.model.finish_init(incarnation)
        self.job.run(now)
        self._settle(now, Topic.MODEL, Topic.JOB)

    def map_in_force(self) -> ShardMap | None:
        """The map, once every holder has installed it; None = not yet."""
        shard_map = self.model.shard_map
        holders = [self.members.find(incarnation) for incarnation in self.model.holders()]
        if shard_map is None or any(h is None or h.ended or h.seen_map < shard_map.epoch for h in holders):
            return None
        return shard_map

    def open_stream(self, now: float, incarnation: Incarnation, spec: StreamSpec) -> int:
        """A worker opens a data stream; returns the oldest unfinished epoch. A script without model is live with it."""
        member = self._active(now, incarnation)
        first, is_new = self.data.open(spec)
        if is_new:
            self._emit(StreamRecord(spec=spec))
        self._make_live(member, "opened a data stream")
        self._settle(now, Topic.DATA)
        return first

    def lease(self, now: float, incarnation: Incarnation, ask: LeaseAsk, request: int = 0) -> Lease:
        """Next range for a worker. The same `request` (not 0) gets the same range again: its answer may be lost."""
        member = self._active(now, incarnation)
        if member.role is not Role.WORKER:
            raise Refused(f"{member} is no worker and can't lease data")
        last = self._leases.get(incarnation)
        if request and last is not None and last[0] == request:
            return last[1]
        if not self.job.record.gate_open:
            return Lease(verdict=LeaseVerdict.WAIT)
        done_before = self.data.samples
        lease = self.data.lease(incarnation, ask, workers=len(self.members.live(Role.WORKER)), now=now)
        if lease.verdict is LeaseVerdict.RANGE:
            self._leases[incarnation] = request, lease
            self.job.run(now)
        if self.data.samples != done_before:  # a tail was dropped, which may end the epoch for those who wait
            self._settle(now, Topic.DATA)
        return lease

    def ack_data(
        self, now: float, incarnation: Incarnation, done: tuple[DataRange, ...], returned: tuple[DataRange, ...] = ()
    ) -> None:
        """Samples that are done, and samples that others may have."""
        self._member(now, incarnation)
        for part in done:
            self.data.finish(part)
        for part in returned:
            self.data.give_back(incarnation, part)
        self._settle(now, Topic.DATA)

    def report(self, now: float, incarnation: Incarnation, numbers: Mapping[str, float]) -> None:
        """Numbers for status and summary."""
        self._member(now, incarnation)
        if len(self.numbers.keys() | numbers.keys()) > MAX_NUMBERS:
            raise Refused(f"more than {MAX_NUMBERS} names reported")
        self.numbers.update(numbers)
        for name, value in numbers.items():
            self._emit(NumberRecord(name=name, value=value))

    def leave(
        self, now: float, incarnation: Incarnation, reason: LeaveReason, *, exit_code: int = 0, detail: str = ""
    ) -> None:
        """A member says goodbye. Again is fine."""
        self._begin(now)
        member = self.members.find(incarnation)
        if member is not None and member.state is MemberState.LEFT:
            return
        member = self._member(now, incarnation)
        text = reason.value + (f": {detail}" if detail else "")
        self._end(now, member, MemberState.LEFT, text, done=reason is LeaveReason.DONE)
        if member.role is Role.WORKER and reason is LeaveReason.FAILED:
            why = detail or f"exit code {exit_code}"
            self._finish(now, JobState.FAILED, f"script of {member} failed: {why}", exit_code or 1)
        self._settle(now)

    def report_exit(self, now: float, *, name: str, pid: int, exit_code: int, final: bool) -> None:
        """A launcher has reaped a member's process. `exit_code` < 0 is a signal; `final`: none will follow it."""
        self._begin(now)
        member = self.members.named(name)
        if member is not None and member.pid != pid:
            member = None
        how = f"was killed by signal {-exit_code}" if exit_code < 0 else f"exited with code {exit_code}"
        who = str(member) if member is not None else f"{name} (pid {pid})"
        if member is not None:
            member.replaced = not final
            if not member.ended:
                self._end(now, member, MemberState.DEAD, f"{how} without a goodbye", done=False, final=final)
        elif final:
            self.job.worker_lost()
        is_worker = member is None or member.role is Role.WORKER
        if exit_code > 0 and (final or member is not None) and is_worker:
            self._finish(now, JobState.FAILED, f"{who} {how}", exit_code)
        elif final and not is_worker and member is not None and member.role is Role.SERVER:
            self._server_gone_for_good(now, f"{who} {how}")
        self._settle(now, Topic.DATA)

    def stop(self, now: float, *, interrupted: bool, reason: str) -> None:
        """End the job early for everybody."""
        self._begin(now)
        state = JobState.INTERRUPTED if interrupted else JobState.FAILED
        self._finish(now, state, reason or "stopped", 0 if interrupted else 1)
        self._settle(now)

    def release(self, now: float) -> None:
        """Results are saved: everybody may exit. Raises `Refused` while the job is not over."""
        self._begin(now)
        if not self.job.over:
            raise Refused(f"the job is {self.job.state.value}; release comes after its end")
        self.job.release()
        self._settle(now, Topic.JOB)

    def tick(self, now: float) -> None:
        """Call every `options.tick_s`. A tick that comes late is the coordinator's own stall and charged to nobody."""
        self._begin(now)
        period_s = self.options.tick_s
        if self._last_tick is not None and now - self._last_tick > 2 * period_s:
            gap_s = now - self._last_tick - period_s
            logger.warning("the coordinator itself stood still for %.1f s; leases are extended by that", gap_s)
            self.members.extend_leases(gap_s)
        self._last_tick = now
        lease_s = self.options.settings.lease_s
        for member in self.members.expired(now):
            reason = f"no session and no heartbeat for {now - member.heard_at:.1f} s (lease_s = {lease_s:g})"
            self._end(now, member, MemberState.DEAD, reason, done=False)
        self.rates.add(now, self.samples)
        self._settle(now)

    def news(self, incarnation: Incarnation, seen: Seen) -> News:
        """What to tell a member that has heard `seen`."""
        return news(self, incarnation, seen)

    def _proposal(self, incarnation: Incarnation) -> Proposal:
        shard_map = self.map_in_force()
        if shard_map is None:
            return _wait("servers are taking over their shards")
        if self.model.ready:
            return Proposal(verdict=Verdict.READY, reason="", shard_map=shard_map)
        if self.model.initialiser == incarnation:
            return Proposal(verdict=Verdict.INITIALISE, reason="", shard_map=shard_map)
        return _wait(f"incarnation {self.model.initialiser} writes the initial weights")


def _wait(reason: str) -> Proposal:
    return Proposal(verdict=Verdict.WAIT, reason=reason, shard_map=None)


def _dialable(address: str) -> bool:
    port = address.rpartition(":")[2]
    return port.isdigit() and 0 < int(port) < 65536
