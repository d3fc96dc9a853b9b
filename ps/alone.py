"""A whole job in one process: the coordinator's state machine, servers' hosts, and the lines to both.

What runs alone is the same state machine, hosts and worker code as in a cluster; only gRPC and RPC are left out.
Several workers may join, each on a thread of its own.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypeVar

from ps.clock import Clock, Deadline, MonotonicClock
from ps.consistency.parse import choice
from ps.control.api import (
    DataRange,
    JobSettings,
    Joined,
    Lease,
    LeaseAsk,
    LeaseVerdict,
    Proposal,
    SessionListener,
    ShardMap,
    StreamSpec,
    Verdict,
)
from ps.control.news import Seen
from ps.control.records import Options
from ps.control.state import CoordinatorState
from ps.errors import PsError
from ps.rpc.local import LocalTransport
from ps.rpc.transport import Transport
from ps.secrets import new_secret
from ps.sharding.spec import ModelSignature
from ps.types import Incarnation, LeaveReason, Role

if TYPE_CHECKING:
    from ps.consistency.policy import Policy, Ruling
    from ps.server.host import Host

T = TypeVar("T")

EXACT = JobSettings(exact=True)
"""Alone, the result is that of plain PyTorch, bit for bit."""


@dataclass(slots=True)
class _Session:
    """A member that hears the news."""

    listener: SessionListener
    seen: Seen
    fenced: bool = False


class LocalJob:
    """A job within this process. Thread-safe. Servers start with the first transport that is opened."""

    def __init__(
        self,
        *,
        servers: int = 1,
        settings: JobSettings = EXACT,
        clock: Clock | None = None,
        policy: Callable[[], Policy] | None = None,
    ) -> None:
        """`policy` makes each shard's policy; as the settings say unless given."""
        self.clock = clock or MonotonicClock()
        self.settings = settings
        self.hosts: dict[Incarnation, Host] = {}
        self._servers = servers
        self._policy = policy
        self._server_seen: dict[Incarnation, Seen] = {}
        self._sessions: dict[Incarnation, _Session] = {}
        self._members = 0
        # Guards everything above and the state. Held while news are delivered, which only write notes down; never
        # while a host works on a request.
        self._changed = threading.Condition(threading.RLock())
        self.state = CoordinatorState(self.clock.now(), Options(servers=servers, settings=settings))

    def member(self) -> LocalMember:
        """A line to the job for one more worker."""
        with self._changed:
            self._members += 1
        return LocalMember(self)

    def event(self, act: Callable[[CoordinatorState, float], T], *, quiet: bool = False) -> T:
        """Let `act` change the state, and tell everybody what follows from it.

        `quiet`: don't wake those who wait in `wait`; for what they do themselves, else two of them wake each other.
        """
        with self._changed:
            try:
                return act(self.state, self.clock.now())
            finally:
                self.state.records()  # nothing outlives this process
                self.state.topics()
                self._deliver()
                if not quiet:
                    self._changed.notify_all()

    def wait(self, look: Callable[[], T | None], timeout_s: float) -> T | None:
        """Call `look` after each change until it gives something; None after `timeout_s`."""
        deadline = Deadline.after(self.clock, timeout_s)
        with self._changed:
            while True:
                found = look()
                left_s = deadline.remaining_s(self.clock)
                if found is not None or left_s <= 0:
                    return found
                self._changed.wait(min(left_s, 0.2))  # in slices, so that signal handlers run

    def listen(self, incarnation: Incarnation, listener: SessionListener) -> None:
        """Tell `listener` the news of a member from now on."""
        with self._changed:
            self._sessions[incarnation] = _Session(listener, Seen())
            self._deliver()

    def hush(self, incarnation: Incarnation) -> None:
        """Tell a member nothing any more."""
        with self._changed:
            self._sessions.pop(incarnation, None)

    def start_servers(self) -> None:
        """Start the hosts, once."""
        with self._changed:
            while len(self.hosts) < self._servers:
                self._start_server()

    def look_after(self) -> None:
        """Let the hosts, which have no threads, answer what has waited too long."""
        for host in list(self.hosts.values()):
            host.tick()

    def release(self) -> None:
        """One member less; with the last one the hosts stop."""
        with self._changed:
            self._members -= 1
            hosts = list(self.hosts.values()) if self._members <= 0 else []
        for host in hosts:
            host.close()

    def _host(self) -> Host:
        from ps.server.host import Host  # not before a model is attached: join() is to be fast

        policy = self._policy or choice(self.settings.consistency).make
        return Host(exact=self.settings.exact, policy=policy, clock=self.clock, on_rulings=self._pass_on)

    def _pass_on(self, rulings: tuple[Ruling, ...]) -> None:
        """What a shard of one host has decided goes to all; that host has heard of it."""
        for host in list(self.hosts.values()):
            host.install_rulings(rulings)

    def _start_server(self) -> None:
        joined = self.event(lambda s, now: s.join(now, role=Role.SERVER, name="", host="", pid=0, secret=new_secret()))
        self.hosts[joined.incarnation] = self._host()
        self._server_seen[joined.incarnation] = Seen()
        self.event(lambda s, now: s.ready(now, joined.incarnation, f"local:{joined.incarnation}"))

    def _deliver(self) -> None:
        """Bring servers and listeners up to date, until nothing is new."""
        while sum(self._tell_server(server, host) for server, host in self.hosts.items()):
            pass
        for incarnation, session in list(self._sessions.items()):
            self._tell(incarnation, session)

    def _tell_server(self, server: Incarnation, host: Host) -> bool:
        """Whether there was any news for it."""
        news = self.state.news(server, self._server_seen[server])
        self._server_seen[server] = news.seen
        if news.membership is not None:
            host.install_members(news.membership[1])
        if news.shard_map is not None:
            host.install_map(news.shard_map, server)
        if news.membership is None and news.shard_map is None:
            return False
        seen = news.seen
        now, entries = self.clock.now(), host.entries()
        self.state.installed(now, server, membership=seen.membership, map_epoch=seen.map_epoch, entries=entries)
        return True

    def _tell(self, incarnation: Incarnation, session: _Session) -> None:
        news = self.state.news(incarnation, session.seen)
        session.seen = news.seen
        if news.fenced is not None:
            if not session.fenced:
                session.fenced = True
                session.listener.on_fenced(news.fenced)
            return
        if news.shard_map is not None:
            session.listener.on_shard_map(news.shard_map)
        if news.job is not None:
            session.listener.on_job(news.job.state, news.job.reason, news.job.released)


class LocalControl:
    """`Control` of one member of a `LocalJob`. Thread-safe."""

    def __init__(self, job: LocalJob) -> None:
        self._job = job
        self._joined: Joined | None = None
        self._out = False

    def join(self, *, role: Role, name: str = "", timeout_s: float = 30.0) -> Joined:
        """See `Control.join`."""
        joined = self._job.event(lambda s, now: s.join(now, role=role, name=name, host="", pid=0, secret=new_secret()))
        self._joined = joined
        return joined

    def start_session(self, listener: SessionListener) -> None:
        """See `Control.start_session`; news come on the thread that causes them."""
        self._job.event(lambda s, now: s.open_session(now, self._me))
        self._job.listen(self._me, listener)

    def ready(self, address: str, *, timeout_s: float = 30.0) -> None:
        """See `Control.ready`."""
        self._job.event(lambda s, now: s.ready(now, self._me, address))
        self._need(self._job.wait(lambda: self._job.state.known(self._me), timeout_s), "servers to know this member")

    def take_part(self, part: bool, *, timeout_s: float = 30.0) -> None:
        """See `Control.take_part`."""
        self._job.event(lambda s, now: s.take_part(now, self._me, part))
        if part:
            known = self._job.wait(lambda: self._job.state.known(self._me), timeout_s)
            self._need(known, "servers to count this worker")

    def propose_model(self, signature: ModelSignature, *, wait_s: float = 2.0) -> Proposal:
        """See `Control.propose_model`."""
        proposal = self._propose(signature)
        if proposal.verdict is Verdict.WAIT:
            decided = self._job.wait(lambda: _decided(self._propose(signature, quiet=True)), wait_s)
            return decided or proposal
        return proposal

    def finish_init(self, *, timeout_s: float = 30.0) -> ShardMap:
        """See `Control.finish_init`."""
        self._job.event(lambda s, now: s.finish_init(now, self._me))
        return self._need(self._job.wait(lambda: self._job.state.map_in_force(), timeout_s), "servers to take the map")

    def shard_map(self) -> ShardMap | None:
        """See `Control.shard_map`."""
        return self._job.state.model.shard_map

    def open_stream(self, spec: StreamSpec) -> int:
        """See `Control.open_stream`."""
        return self._job.event(lambda s, now: s.open_stream(now, self._me, spec))

    def lease(self, ask: LeaseAsk, *, wait_s: float = 2.0) -> Lease:
        """See `Control.lease`."""
        found = self._job.wait(lambda: self._lease(ask), wait_s)
        return found or Lease(verdict=LeaseVerdict.WAIT)

    def ack(self, done: tuple[DataRange, ...], returned: tuple[DataRange, ...] = ()) -> None:
        """See `Control.ack`."""
        self._job.event(lambda s, now: s.ack_data(now, self._me, done, returned))

    def report(self, numbers: Mapping[str, float]) -> None:
        """See `Control.report`."""
        self._job.event(lambda s, now: s.report(now, self._me, numbers))

    def leave(self, reason: LeaveReason, *, exit_code: int = 0, detail: str = "") -> None:
        """See `Control.leave`."""
        if self._out or self._joined is None:
            return
        self._out = True
        self._job.hush(self._me)
        self._job.event(lambda s, now: s.leave(now, self._me, reason, exit_code=exit_code, detail=detail))

    def close(self) -> None:
        """See `Control.close`."""
        if self._joined is not None:
            self._job.hush(self._me)

    @property
    def _me(self) -> Incarnation:
        if self._joined is None:
            raise PsError("join() comes first")
        return self._joined.incarnation

    def _propose(self, signature: ModelSignature, *, quiet: bool = False) -> Proposal:
        return self._job.event(lambda s, now: s.propose(now, self._me, signature), quiet=quiet)

    def _lease(self, ask: LeaseAsk) -> Lease | None:
        lease = self._job.event(lambda s, now: s.lease(now, self._me, ask), quiet=True)
        return None if lease.verdict is LeaseVerdict.WAIT else lease

    def _need(self, found: T | None, what: str) -> T:
        if found is None:
            raise PsError(f"waited in vain for {what}")
        return found


class LocalMember:
    """A worker's `Backend` in a `LocalJob`."""

    alone = True

    def __init__(self, job: LocalJob) -> None:
        self._job = job
        self._closed = False
        self.control = LocalControl(job)

    def open_transport(self, joined: Joined) -> Transport:
        """The line to the job's hosts, which start with the first call."""
        self._job.start_servers()
        job = self._job
        return LocalTransport(job.hosts, joined.incarnation, clock=job.clock, idle=job.look_after)

    def close(self) -> None:
        """Give the line up; the job's hosts stop with the last one. Idempotent."""
        if not self._closed:
            self._closed = True
            self._job.release()


def settings(*, exact: bool = True, shard_bytes: int = 0) -> JobSettings:
    """Settings of a job within one process."""
    return replace(EXACT, exact=exact, shard_bytes=shard_bytes)


def _decided(proposal: Proposal) -> Proposal | None:
    return None if proposal.verdict is Verdict.WAIT else proposal
