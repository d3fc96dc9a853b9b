"""Members of the job: incarnations, states, leases, and what each server has installed of the membership.

A member is dead when its session is lost *and* its lease has run out, or when its process is reported gone. The
membership version numbers the list of members that servers admit; it continues to rise across restarts, because its
upper half is the coordinator's generation.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from ps.control.api import Admitted, ServerProgress, WorkerProgress
from ps.control.records import IdsRecord, MemberPruned, MemberRecord, Record, Replay
from ps.errors import Fenced, Refused, WireError
from ps.secrets import derive
from ps.types import MAX_INCARNATION, Incarnation, MemberState, Part, Role

ID_BLOCK = 64
"""Incarnations are reserved in blocks of this many, so that a join needs no journal entry of its own for them."""

KEPT_FINAL = 256
"""Members that left or died and are still shown; older ones are forgotten."""

NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")

FINAL = (MemberState.LEFT, MemberState.DEAD)

_NEXT = {
    MemberState.JOINING: (MemberState.LIVE, *FINAL),
    MemberState.LIVE: (MemberState.DRAINING, *FINAL),
    MemberState.DRAINING: FINAL,
    MemberState.LEFT: (),
    MemberState.DEAD: (),
}


class NameTaken(Refused):
    """The name asked for belongs to a member that is alive; it may be free soon."""


@dataclass(slots=True, kw_only=True)
class Member:
    """One incarnation of one process."""

    incarnation: Incarnation
    role: Role
    name: str
    host: str
    pid: int
    secret: bytes = field(repr=False)
    nonce: bytes = field(repr=False, default=b"")
    heard_at: float
    """When anything last came from it; coordinator's monotonic seconds."""
    lease_until: float
    state: MemberState = MemberState.JOINING
    address: str = ""
    """RPC address; only servers have one."""
    reason: str = ""
    """Why it ended; empty while it has not."""
    session: int = 0
    """Token of its open session, 0 = none."""
    was_live: bool = False
    admitted_at: int = 0
    """First membership version that holds it; 0 while it is joining."""
    part: Part = Part.OUT
    """Workers: whether others wait for their pushes."""
    clock: int = 0
    """With IN: the clock of its first push since it came in."""
    part_at: int = 0
    """Membership version that holds its part."""
    entries: tuple[int, ...] = ()
    """Servers: clocks at which ENTERING workers count there, as of `seen_membership`."""
    seen_membership: int = 0
    """Servers: newest membership version it has installed."""
    seen_map: int = 0
    """Newest map epoch it has installed."""
    worker: WorkerProgress = field(default_factory=WorkerProgress)
    server: ServerProgress = field(default_factory=ServerProgress)
    runs: str = ""
    """Its torch version and CPU capability; empty when unknown."""
    replaced: bool = True
    """False once its launcher has said that no process will follow it."""
    history: deque[str] = field(default_factory=lambda: deque(maxlen=8))

    @property
    def ended(self) -> bool:
        """Left or dead."""
        return self.state in FINAL

    def move(self, state: MemberState, why: str) -> None:
        """Change state; an impossible change is a bug, and shows what led to it."""
        assert state in _NEXT[self.state], (self, state, why, list(self.history))
        self.history.append(f"{self.state.value} → {state.value}: {why}")
        self.state = state

    def record(self) -> MemberRecord:
        """What the journal keeps of it."""
        return MemberRecord(
            incarnation=self.incarnation, role=self.role, name=self.name, host=self.host, pid=self.pid,
            secret=self.secret, nonce=self.nonce, state=self.state, address=self.address, reason=self.reason,
        )  # fmt: skip

    def __str__(self) -> str:
        return f"{self.name} (incarnation {self.incarnation}, pid {self.pid} on {self.host})"


class Members:
    """The table of members. Not thread-safe; time comes in as an argument."""

    def __init__(self, replay: Replay, *, lease_s: float, max_members: int, emit: Callable[[Record], None]) -> None:
        self._lease_s = lease_s
        self._max_members = max_members
        self._emit = emit
        self._next = replay.reserved_end
        self._reserved_end = replay.reserved_end
        self._sessions = 0
        self._table: dict[Incarnation, Member] = {}
        self.version = replay.generation << 32
        self.retired = WorkerProgress()
        """Progress of forgotten workers."""

    def adopt(self, now: float, record: MemberRecord) -> Member:
        """Take over a member from the journal, with a full lease: it could not renew while nobody listened."""
        member = Member(
            incarnation=record.incarnation, role=record.role, name=record.name, host=record.host, pid=record.pid,
            secret=record.secret, nonce=record.nonce, state=record.state, address=record.address,
            reason=record.reason, heard_at=now, lease_until=now + self._lease_s,
        )  # fmt: skip
        member.history.append(f"adopted as {record.state.value}")
        member.was_live = record.state in (MemberState.LIVE, MemberState.DRAINING)
        self._table[member.incarnation] = member
        if member.was_live:
            self._admit(member)
            member.part, member.part_at = Part.KEPT, self.version
        return member

    def join(
        self, now: float, *, role: Role, name: str, host: str, pid: int, secret: bytes, nonce: bytes = b""
    ) -> Member:
        """A new member, or the one that this very request made before. The name must be free."""
        if name and not NAME.fullmatch(name):
            raise WireError(f"member name {name!r}: 1 to 64 letters, digits, - and _ are allowed")
        if sum(not member.ended for member in self) >= self._max_members:
            raise Refused(f"the job has {self._max_members} members, its limit (max_members)")
        member = Member(
            incarnation=self._new_id(), role=role, name=name or self._free_name(role), host=host, pid=pid,
            secret=secret, nonce=nonce, heard_at=now, lease_until=now + self._lease_s,
        )  # fmt: skip
        member.history.append("joined")
        self._table[member.incarnation] = member
        self._emit(member.record())
        return member

    def with_nonce(self, nonce: bytes) -> Member | None:
        """The member made by the join request with this nonce."""
        return next((m for m in self if nonce and m.nonce == nonce and not m.ended), None)

    def named(self, name: str) -> Member | None:
        """The member of this name that has not ended, else the newest that has."""
        found = [member for member in self if member.name == name]
        return next((m for m in found if not m.ended), found[-1] if found else None)

    def get(self, incarnation: Incarnation) -> Member:
        """A member that has not ended; raises `Fenced` for all others."""
        member = self._table.get(incarnation)
        if member is None:
            raise Fenced(f"incarnation {incarnation} is not a member of this job; start a new process")
        if member.ended:
            raise Fenced(f"{member} is out of the job: {member.reason or member.state.value}; start a new process")
        return member

    def find(self, incarnation: Incarnation) -> Member | None:
        """A member, ended or not; None when unknown or forgotten."""
        return self._table.get(incarnation)

    def __iter__(self) -> Iterator[Member]:
        return iter(list(self._table.values()))

    def live(self, role: Role) -> list[Member]:
        """Members of a role that are live, oldest first."""
        return [m for m in self._table.values() if m.role is role and m.state is MemberState.LIVE]

    def present(self, role: Role) -> list[Member]:
        """Members of a role that have not ended."""
        return [m for m in self._table.values() if m.role is role and not m.ended]

    def open_session(self, member: Member) -> int:
        """A session began; it replaces an older one. Returns its token."""
        self._sessions += 1
        member.session = self._sessions
        return member.session

    def touch(self, now: float, member: Member) -> None:
        """Something came from the member: its lease is renewed."""
        member.heard_at = now
        member.lease_until = max(member.lease_until, now + self._lease_s)

    def extend_leases(self, gap_s: float) -> None:
        """The coordinator itself stood still for `gap_s`: nobody could renew."""
        for member in self._table.values():
            member.lease_until += gap_s

    def expired(self, now: float) -> list[Member]:
        """Members to be evicted."""
        return [m for m in self if not m.ended and not m.session and now >= m.lease_until]

    def make_live(self, member: Member, why: str, address: str = "") -> bool:
        """Announce a member to servers; returns False when it is live already."""
        if member.state is not MemberState.JOINING:
            return False
        member.move(MemberState.LIVE, why)
        member.address = address
        member.was_live = True
        self._admit(member)
        self._emit(member.record())
        return True

    def end(self, member: Member, state: MemberState, reason: str) -> None:
        """The member left or is dead; servers stop admitting it."""
        member.move(state, reason)
        member.reason = reason
        self._emit(member.record())
        if member.admitted_at and member.role is not Role.SERVER:
            self.version += 1
        self._prune()

    def change_part(self, member: Member, part: Part, clock: int = 0) -> None:
        """Tell servers of a worker's part."""
        self.version += 1
        member.part, member.clock, member.part_at = part, clock, self.version

    def entering(self) -> list[Member]:
        """Workers whose first clock every live server has been asked for, and not set yet."""
        return [m for m in self.live(Role.WORKER) if m.part is Part.ENTERING and self._seen_by_servers(m.part_at)]

    def admitted(self, server: Incarnation) -> tuple[Admitted, ...]:
        """Who may call this server, with secrets derived for it."""
        return tuple(
            Admitted(
                incarnation=m.incarnation,
                role=m.role,
                secret=derive(m.secret, server),
                part=m.part,
                clock=m.clock,
            )
            for m in self._table.values()
            if m.admitted_at and not m.ended and m.role is not Role.SERVER
        )

    def known_to_servers(self, member: Member) -> bool:
        """Whether every live server has installed a membership that holds this member, and its part."""
        if member.role is Role.SERVER:
            return True
        return member.part is not Part.ENTERING and self._seen_by_servers(max(member.admitted_at, member.part_at))

    def _seen_by_servers(self, version: int) -> bool:
        return all(server.seen_membership >= version for server in self.live(Role.SERVER))

    @property
    def ids_left(self) -> int:
        """Incarnations that were never handed out."""
        return MAX_INCARNATION + 1 - self._next

    def validate(self) -> None:
        """Assert what holds between events."""
        names = [m.name for m in self if not m.ended]
        assert len(names) == len(set(names)), names
        ids = list(self._table)
        assert ids == sorted(set(ids)), ids
        assert all(0 < i < self._next <= self._reserved_end <= MAX_INCARNATION + 1 for i in ids), (ids, self._next)
        for m in self:
            assert m.incarnation in self._table and m.admitted_at <= self.version, m
            assert bool(m.admitted_at) == m.was_live, m
            assert m.seen_membership <= self.version and m.part_at <= self.version, m
            assert m.ended or not m.reason, m
            assert m.state is not MemberState.LIVE or m.role is not Role.SERVER or m.address, m

    def _admit(self, member: Member) -> None:
        if member.role is not Role.SERVER:
            self.version += 1
        member.admitted_at = self.version

    def _new_id(self) -> Incarnation:
        if self._next > MAX_INCARNATION:
            raise Refused(f"all {MAX_INCARNATION} incarnations of this job are used up; start a new job")
        if self._next >= self._reserved_end:
            self._reserved_end = min(self._next + ID_BLOCK, MAX_INCARNATION + 1)
            self._emit(IdsRecord(reserved_end=self._reserved_end))
        self._next += 1
        return Incarnation(self._next - 1)

    def _free_name(self, role: Role) -> str:
        taken = {member.name for member in self if not member.ended}
        return next(name for i in range(len(taken) + 1) if (name := f"{role.value}-{i}") not in taken)

    def _prune(self) -> None:
        final = [m for m in self._table.values() if m.ended]
        for member in final[: max(0, len(final) - KEPT_FINAL)]:
            del self._table[member.incarnation]
            self.retired = WorkerProgress(
                steps=self.retired.steps + member.worker.steps, samples=self.retired.samples + member.worker.samples
            )
            self._emit(MemberPruned(incarnation=member.incarnation))
