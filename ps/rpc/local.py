"""Transport within one process: references are passed, nothing is copied, everything else is as over RPC."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Mapping
from dataclasses import replace

from torch import Tensor

from ps.clock import Clock, MonotonicClock
from ps.errors import PeerLost
from ps.rpc import payload as payloads
from ps.rpc.endpoints import dispatch
from ps.rpc.forks import ForkGuard
from ps.rpc.tickets import LocalTicket
from ps.rpc.transport import ShardHost, Ticket
from ps.rpc.wire import Request
from ps.types import Incarnation


class LocalTransport:
    """`Transport` over hosts of the same process. Thread-safe.

    `hosts` is read at each `connect`, so that a test or the simulator can add and remove servers. `host.submit` runs
    on the caller's thread; request records are passed as they are, only with the secret filled in.
    """

    def __init__(
        self,
        hosts: Mapping[Incarnation, ShardHost],
        incarnation: Incarnation,
        *,
        clock: Clock | None = None,
        idle: Callable[[], object] | None = None,
    ) -> None:
        """`idle` is called by whoever has waited in vain for an answer."""
        self.incarnation = incarnation
        self._hosts = hosts
        self._clock = clock or MonotonicClock()
        self._idle = idle
        self._peers: dict[Incarnation, tuple[ShardHost, bytes]] = {}
        self._open: weakref.WeakSet[LocalTicket] = weakref.WeakSet()
        self._closed = False
        self._lock = threading.Lock()  # guards _peers, _open and _closed; never held while a host runs
        self._guard = ForkGuard()

    @property
    def address(self) -> str:
        """Empty: nobody can dial it."""
        return ""

    def connect(self, server: Incarnation, name: str, address: str, secret: bytes, *, timeout_s: float) -> None:
        """See `Transport.connect`; `address` and `timeout_s` mean nothing here."""
        self._guard.check()
        host = self._hosts.get(server)
        if host is None:
            raise PeerLost(f"server {server} ({name}): no such server in this process")
        with self._lock:
            self._check_open(server)
            self._peers[server] = host, secret

    def disconnect(self, server: Incarnation) -> None:
        """See `Transport.disconnect`."""
        self._guard.check()
        with self._lock:
            self._peers.pop(server, None)

    def submit(self, server: Incarnation, request: Request, payload: Tensor | None, *, timeout_s: float) -> Ticket:
        """See `Transport.submit`. The host may have answered when this returns."""
        self._guard.check()
        checked = payloads.empty() if payload is None else payloads.check(payload, any_device=True)
        ticket = LocalTicket(server, self._guard, self._clock, timeout_s, self._idle)
        with self._lock:
            self._check_open(server)
            peer = self._peers.get(server)
            if peer is None:
                raise PeerLost(f"server {server}: not connected; call connect first")
            self._open.add(ticket)
        host, secret = peer
        if request.caller.secret != secret:
            request = replace(request, caller=replace(request.caller, secret=secret))
        dispatch(host, request, checked, ticket.answer)
        return ticket

    def close(self) -> None:
        """See `Transport.close`. Requests in flight end with `PeerLost`; hosts are left alone."""
        with self._lock:
            self._closed = True
            self._peers.clear()
            tickets = list(self._open)
        for ticket in tickets:
            ticket.fail(PeerLost("the transport was closed"))

    def _check_open(self, server: Incarnation) -> None:
        if self._closed:
            raise PeerLost(f"server {server}: the transport is closed")
