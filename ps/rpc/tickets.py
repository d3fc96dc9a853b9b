"""Requests in flight, and the one place where foreign errors become ours."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace

from torch import Tensor
from torch.futures import Future

from ps.clock import Clock, Deadline
from ps.errors import CallTimeout, PeerLost, PsError, Refused, WireError
from ps.rpc import payload as payloads
from ps.rpc import pickler, torch_private
from ps.rpc.forks import ForkGuard
from ps.rpc.wire import Reply, plain, reply_from_wire
from ps.types import Incarnation


def map_error(error: BaseException, server: Incarnation) -> PsError:
    """The error of ours that stands for what torch RPC raised on a call to `server`.

    No answer in time is `CallTimeout`; a refusal of the message is `Refused`; all else broke the connection and is
    `PeerLost`: end of file, refused or reset connections, closed pipes, unknown aliases.
    """
    text = str(error)
    first = text.strip().partition("\n")[0][:300]
    if torch_private.is_timeout(text):
        return CallTimeout(f"server {server}: no answer in time ({first}); whether it has acted is unknown")
    if pickler.REFUSAL in text or torch_private.is_remote_exception(text):
        return Refused(f"server {server} could not read the message, or this process its answer: {text[:1000]}")
    return PeerLost(f"server {server}: the connection broke ({first}); connect again to go on")


class FutureTicket:
    """A request in flight over torch RPC. Thread-safe; `result` may be asked for more than once."""

    __slots__ = ("_clock", "_done", "_future", "_guard", "_lost", "_server")

    def __init__(
        self,
        future: Future[object],
        server: Incarnation,
        guard: ForkGuard,
        clock: Clock,
        lost: Callable[[PeerLost], None],
    ) -> None:
        self._future = future
        self._server = server
        self._guard = guard
        self._clock = clock
        self._lost = lost
        self._done = done = threading.Event()
        future.add_done_callback(lambda _: done.set())  # runs on a pool thread of RPC: it must do no more than this

    def done(self) -> bool:
        """See `Ticket.done`."""
        return self._done.is_set()

    def result(self, deadline: Deadline) -> tuple[Reply, Tensor]:
        """See `Ticket.result`. Also raises `Refused` where the message itself could not be read."""
        self._guard.check()
        value = self.value(deadline)
        header, payload = value if type(value) is tuple and len(value) == 2 else (None, None)
        return reply_from_wire(header), payloads.check(payload)

    def value(self, deadline: Deadline) -> object:
        """What the endpoint returned, unchecked; errors as for `result`."""
        if not self._clock.wait(self._done, deadline.remaining_s(self._clock)):
            raise CallTimeout(f"server {self._server}: no answer within the deadline; whether it has acted is unknown")
        try:
            return self._future.value()
        except Exception as error:
            mapped = map_error(error, self._server)
            if isinstance(mapped, PeerLost):
                self._lost(mapped)
            raise mapped from None


class LocalTicket:
    """A request in flight within one process. Its `answer` is what the host calls. Thread-safe."""

    __slots__ = ("__weakref__", "_answer", "_clock", "_done", "_expires", "_guard", "_idle", "_server")

    def __init__(
        self,
        server: Incarnation,
        guard: ForkGuard,
        clock: Clock,
        timeout_s: float,
        idle: Callable[[], object] | None = None,
    ) -> None:
        """`idle` is called when a wait was in vain: hosts without threads of their own look after deadlines then."""
        self._idle = idle
        self._server = server
        self._guard = guard
        self._clock = clock
        self._expires = Deadline.after(clock, timeout_s)
        self._done = threading.Event()
        self._answer: tuple[Reply, Tensor] | PsError | None = None

    def answer(self, reply: Reply, payload: Tensor) -> None:
        """Complete the ticket; only the first answer counts. What RPC would refuse to send is refused here too."""
        try:
            payloads.check(payload, any_device=True)
        except WireError as error:
            reply, payload = Reply(refused=f"internal error: {error}"), payloads.empty()
        if reply.refused:
            reply = replace(reply, refused=plain(reply.refused))
        self._complete((reply, payload))

    def fail(self, error: PsError) -> None:
        """End the ticket with an error, unless it is answered."""
        self._complete(error)

    def _complete(self, answer: tuple[Reply, Tensor] | PsError) -> None:
        if not self._done.is_set():
            self._answer = answer
            self._done.set()

    def done(self) -> bool:
        """See `Ticket.done`."""
        return self._done.is_set() or self._expires.expired(self._clock)

    def result(self, deadline: Deadline) -> tuple[Reply, Tensor]:
        """See `Ticket.result`."""
        self._guard.check()
        left_s = min(deadline.remaining_s(self._clock), self._expires.remaining_s(self._clock))
        if not self._clock.wait(self._done, left_s) and self._idle is not None:
            self._idle()
        if not self._done.is_set():
            raise CallTimeout(f"server {self._server}: no answer within the deadline; whether it has acted is unknown")
        answer = self._answer
        if isinstance(answer, PsError):
            raise answer
        assert answer is not None
        return answer
