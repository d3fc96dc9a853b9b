"""The seam between workers and shards: `Transport` on the caller's side, `ShardHost` on the owner's."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from ps.clock import Deadline
from ps.rpc.wire import Reply, Request
from ps.types import Incarnation

if TYPE_CHECKING:
    from torch import Tensor

Answer = Callable[[Reply, "Tensor"], None]
"""Takes a reply and its payload (flat uint8, possibly empty). Called exactly once per request."""


class ShardHost(Protocol):
    """Owner of shards. Thread-safe."""

    def submit(self, request: Request, payload: Tensor, answer: Answer) -> None:
        """Take a request. Never blocks and never raises.

        `answer` is called exactly once, from any thread, perhaps before this returns. `payload` belongs to
        the host until then. The reply's payload may be shared with other replies: receivers only read it.
        """
        ...


class Ticket(Protocol):
    """A request in flight."""

    def done(self) -> bool:
        """Whether `result` would return or raise at once."""
        ...

    def result(self, deadline: Deadline) -> tuple[Reply, Tensor]:
        """Wait for the answer. On the main thread signal handlers run meanwhile.

        Raises `CallTimeout` or `PeerLost`; whether the server has acted is then unknown.
        """
        ...


class Transport(Protocol):
    """Caller's side. Thread-safe. One per process."""

    @property
    def address(self) -> str:
        """Address at which this process can be dialled; empty when it can't be."""
        ...

    def connect(self, server: Incarnation, name: str, address: str, secret: bytes, *, timeout_s: float) -> None:
        """Make `server` callable; replaces an older connection to it. Raises `TransportError`.

        `secret` is this caller's for that server; the transport adds it to each request.
        """
        ...

    def disconnect(self, server: Incarnation) -> None:
        """Forget a server; requests in flight to it end by their own deadline."""
        ...

    def submit(self, server: Incarnation, request: Request, payload: Tensor | None, *, timeout_s: float) -> Ticket:
        """Send a request. Does not block on the network. `payload` must not be changed until the ticket is done.

        Raises `PeerLost` when the connection is known to be broken, `ForkedProcess` in a forked child.
        """
        ...

    def close(self) -> None:
        """End the transport within a bound; idempotent."""
        ...
