"""A server process: join, serve shards, leave. The wiring of everything else in this package."""

from __future__ import annotations

import logging
import os
import signal
import threading
from collections.abc import Callable
from dataclasses import dataclass
from types import FrameType

from ps import logs, net
from ps.clock import Clock, Deadline, MonotonicClock
from ps.config import ServerConfig
from ps.consistency.parse import choice
from ps.consistency.policy import Ruling
from ps.control.api import Admitted, Joined, ServerProgress, ShardMap
from ps.control.client import GrpcControl
from ps.errors import CoordinatorLost, PsError
from ps.optim.apply import warm_up
from ps.rpc.agent import RpcTransport, open_rpc
from ps.server.host import Host
from ps.types import Incarnation, JobState, LeaveReason, Role

log = logging.getLogger(__name__)

SHUTDOWN_S = 20.0
"""Bound on leaving: past it the process ends as it is. The parts have bounds of their own, which add up to less."""

EXIT_FAILED = 1
EXIT_NO_COORDINATOR = 3


@dataclass(frozen=True, slots=True)
class _End:
    """Why the server stops."""

    code: int
    reason: str
    goodbye: bool
    """Whether the coordinator still wants to hear of it."""


class _Member:
    """`SessionListener` of a server: hands news to the host and remembers the first reason to stop. Thread-safe."""

    def __init__(self, host: Host, me: Incarnation) -> None:
        self.ended = threading.Event()
        self.end = _End(EXIT_FAILED, "", True)
        self._host = host
        self._me = me
        self._state = JobState.WAITING
        self._holds = False

    def on_membership(self, version: int, admitted: tuple[Admitted, ...]) -> tuple[int, ...]:
        """See `SessionListener`."""
        self._host.install_members(admitted)
        return self._host.entries()

    def on_rulings(self, rulings: tuple[Ruling, ...]) -> None:
        """See `SessionListener`."""
        self._host.install_rulings(rulings)

    def on_shard_map(self, shard_map: ShardMap) -> None:
        """See `SessionListener`."""
        self._host.install_map(shard_map, self._me)
        self._holds = any(holder.incarnation == self._me for holder in shard_map.holders)

    def on_job(self, state: JobState, reason: str, release: bool) -> None:
        """See `SessionListener`."""
        self._state = state
        if release:
            self.stop(_End(0, f"the job is {state.value}: {reason}", True))

    def on_drain(self, reason: str) -> None:
        """See `SessionListener`."""
        self.stop(self._asked(f"the coordinator asked it to leave: {reason}"))

    def on_fenced(self, reason: str) -> None:
        """See `SessionListener`."""
        self.stop(_End(EXIT_FAILED, f"evicted by the coordinator: {reason}; start it again to rejoin", False))

    def on_lost(self, reason: str) -> None:
        """See `SessionListener`."""
        code = 0 if self._state.over else EXIT_NO_COORDINATOR
        self.stop(_End(code, f"the coordinator is lost: {reason}", False))

    def on_signal(self, number: int, frame: FrameType | None) -> None:
        """SIGTERM and Ctrl-C; the second one ends the process at once."""
        if self.ended.is_set():
            os._exit(128 + number)
        self.stop(self._asked(signal.Signals(number).name))

    def progress(self) -> ServerProgress:
        """See `SessionListener`."""
        return self._host.progress()

    def stop(self, end: _End) -> None:
        """Stop the server, for this reason unless there is one already."""
        if not self.ended.is_set():
            self.end = end
            self.ended.set()

    def _asked(self, reason: str) -> _End:
        """Leaving on request is in order unless it takes weights away from a running job."""
        if self._holds and not self._state.over:
            return _End(EXIT_FAILED, f"{reason}: stopped while it held shards of a job that is not over", True)
        return _End(0, reason, True)


def run_server(config: ServerConfig) -> int:
    """Serve until the job is over and released, or until a signal; returns the exit code. Main thread only.

    0: released, or asked to stop while it held nothing that a running job needs. 3: the coordinator could not be
    reached, or was lost. 1: everything else, for example evicted. Raises `ConfigError` and `CoordinatorLost` at the
    start. Takes over SIGTERM and SIGINT.
    """
    clock = MonotonicClock()
    member_of = config.member
    ip = net.own_address(member_of.coordinator.host, advertise=member_of.advertise, interface=member_of.interface)
    control = GrpcControl(config.member.coordinator, clock=clock)
    warm_up()  # before the join: a member that is silent for too long is evicted
    try:
        joined = control.join(role=Role.SERVER, name=config.member.name, timeout_s=config.member.join_timeout_s)
        logs.identify(f"{joined.name}#{joined.incarnation}")
        host = make_host(config, joined, control.send_rulings)
        member = _Member(host, joined.incarnation)
        signal.signal(signal.SIGTERM, member.on_signal)
        signal.signal(signal.SIGINT, member.on_signal)
        transport = _open(config, joined, ip, host)
        try:
            _serve(control, transport, member, clock)
        finally:
            _shut_down(control, transport, host, member)
    finally:
        control.close()
    if member.end.code:
        log.error("%s", member.end.reason)
    return member.end.code


def make_host(
    config: ServerConfig, joined: Joined, on_rulings: Callable[[tuple[Ruling, ...]], None] | None = None
) -> Host:
    """The owner of this server's shards."""
    return Host(
        on_rulings=on_rulings,
        policy=choice(joined.settings.consistency).make,
        exact=joined.settings.exact,
        apply_threads=config.apply_threads,
        snapshots=config.snapshots,
        queue_bytes=config.queue_bytes,
    )


def _open(config: ServerConfig, joined: Joined, ip: str, host: Host) -> RpcTransport:
    return open_rpc(
        incarnation=joined.incarnation,
        name=joined.name,
        host_ip=ip,
        interface=config.member.interface,
        transports=joined.settings.transports,
        channels=joined.settings.channels,
        shard_host=host,
        rpc_threads=config.rpc_threads,
    )


def _serve(control: GrpcControl, transport: RpcTransport, member: _Member, clock: Clock) -> None:
    """From the first heartbeat to the reason to stop."""
    try:
        control.start_session(member)
        control.ready(transport.address)
        log.info("serves at %s", transport.address)
        while not clock.wait(member.ended, 1.0):  # in slices, so that signal handlers run
            pass
        log.info("stops: %s", member.end.reason)
    except PsError as error:
        code = EXIT_NO_COORDINATOR if isinstance(error, CoordinatorLost) else EXIT_FAILED
        member.stop(_End(code, str(error), not isinstance(error, CoordinatorLost)))


def _shut_down(control: GrpcControl, transport: RpcTransport, host: Host, member: _Member) -> None:
    """Leave, and end the agent, within `SHUTDOWN_S`; the process ends the hard way when that is not kept."""
    done = threading.Event()
    code = member.end.code
    watchdog = threading.Thread(target=_watch, args=(done, code), name="ps-shutdown-watch", daemon=True)
    watchdog.start()
    try:
        if member.end.goodbye:
            reason = LeaveReason.FAILED if code else LeaveReason.DRAINED
            control.leave(reason, exit_code=code, detail=member.end.reason if code else "")
    except PsError as error:
        log.warning("could not say goodbye to the coordinator: %s", error)
    transport.close()
    host.close()
    if transport.wedged:
        _exit_hard(code)
    done.set()
    watchdog.join()


def _watch(done: threading.Event, code: int) -> None:
    clock = MonotonicClock()
    deadline = Deadline.after(clock, SHUTDOWN_S)
    if not clock.wait(done, deadline.remaining_s(clock)):
        log.error("leaving took more than %.0f s; the process ends now", SHUTDOWN_S)
        _exit_hard(code)


def _exit_hard(code: int) -> None:
    """torch's threads may hang in C++; nothing of value is left in this process."""
    logging.shutdown()
    os._exit(code)
