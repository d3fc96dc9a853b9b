"""One connection to a server: its alias and the one RRef that stands for the server's shards, from open to close."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from torch import Tensor
from torch.futures import Future

from ps.clock import Clock, Deadline
from ps.errors import PeerLost, Refused, TransportError
from ps.rpc import endpoints
from ps.rpc.forks import ForkGuard
from ps.rpc.membership import Star
from ps.rpc.tickets import FutureTicket, map_error
from ps.rpc.wire import WIRE_FORMAT, Request, to_wire
from ps.types import Incarnation

LEAST_TIMEOUT_S = 0.001
"""torch RPC counts whole milliseconds, and 0 would mean to wait for ever."""

Sent = TypeVar("Sent")

_kept: list[object] = []
"""References of connections not known to be sound. Dropping one would make torch retry to tell the owner in the
background, reading membership tables where no lock of ours reaches; so they stay, one small object per reconnect."""


class Connection:
    """A server under one alias. Thread-safe. Once broken it stays broken."""

    def __init__(
        self, star: Star, server: Incarnation, name: str, address: str, secret: bytes, *, guard: ForkGuard, clock: Clock
    ) -> None:
        self.server = server
        self._star = star
        self._secret = secret
        self._guard = guard
        self._clock = clock
        self._what = f"server {server} ({name}) at {address}"
        self._broken: PeerLost | None = None
        self._references: list[object] = []
        self._peer = star.add(server, name, address)

    def open(self, deadline: Deadline) -> None:
        """Check that this server answers, then obtain its RRef. Raises `TransportError` or `Refused`."""
        try:
            self._greet(deadline)
            left_s = max(deadline.remaining_s(self._clock), LEAST_TIMEOUT_S)
            rref, made = self._issue(lambda: self._star.reference(self._peer, endpoints.shards, left_s))
            self._references.append(rref)
            self._ticket(made).value(deadline)
        except TransportError as error:
            raise type(error)(f"{self._what} can't be reached: {error}") from None

    def submit(self, request: Request, payload: Tensor, timeout_s: float) -> FutureTicket:
        """Issue a request with this caller's secret. Raises `PeerLost` when the connection is known to be broken."""
        return self._call(endpoints.call, (to_wire(request, self._secret), payload), timeout_s)

    def close(self) -> None:
        """Give the alias up. A sound server is told that its RRef is dropped. Idempotent."""
        already, self._broken = self._broken, PeerLost(f"{self._what}: disconnected")
        if already is not None:
            _kept.extend(self._references)
        self._star.remove(self._peer, self._references)

    def mark_broken(self, error: PeerLost) -> None:
        """No call on this connection can succeed any more."""
        self._broken = self._broken or error

    def _greet(self, deadline: Deadline) -> None:
        left_s = deadline.remaining_s(self._clock)
        answer = self._call(endpoints.greet, (), left_s).value(deadline)
        if answer != (WIRE_FORMAT, self.server):
            raise Refused(
                f"{self._what}: answered {answer!r}, expected (wire format, incarnation) = {(WIRE_FORMAT, self.server)}"
            )

    def _call(self, function: Callable[..., object], args: tuple[object, ...], timeout_s: float) -> FutureTicket:
        bounded_s = max(timeout_s, LEAST_TIMEOUT_S)
        return self._ticket(self._issue(lambda: self._star.call(self._peer, function, args, bounded_s)))

    def _issue(self, send: Callable[[], Sent]) -> Sent:
        if self._broken is not None:
            raise PeerLost(str(self._broken))
        try:
            return send()
        except (RuntimeError, ValueError) as error:  # what torch raises when it can't send
            mapped = map_error(error, self.server)
            if isinstance(mapped, PeerLost):
                self.mark_broken(mapped)
            raise mapped from None

    def _ticket(self, future: Future[object]) -> FutureTicket:
        return FutureTicket(future, self.server, self._guard, self._clock, self.mark_broken)
