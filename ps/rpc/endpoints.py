"""The only functions that can be called from afar; each hands over to the installed `ShardHost` and never blocks.

A caller controls every argument, so the signatures take anything and check it. Nothing here raises: what can't be
right is answered by a refusing `Reply`.
"""

from __future__ import annotations

import logging
import threading
from dataclasses import dataclass
from typing import NoReturn

from torch import Tensor
from torch.distributed.rpc import functions
from torch.futures import Future

from ps.errors import WireError
from ps.rpc import payload as payloads
from ps.rpc.transport import Answer, ShardHost
from ps.rpc.wire import WIRE_FORMAT, Reply, Request, Wire, from_wire, plain, reply_to_wire
from ps.types import Incarnation

log = logging.getLogger(__name__)

Answered = Future[tuple[Wire, Tensor]]


@dataclass(frozen=True, slots=True)
class Shards:
    """What a server's RRef stands for: the shards of one server incarnation. It never leaves its process."""

    incarnation: Incarnation
    host: ShardHost

    def __reduce__(self) -> NoReturn:
        raise TypeError("the shards of a server can't be copied to another process; call them")


_installed: Shards | None = None


def install(host: ShardHost, incarnation: Incarnation) -> None:
    """Serve `host` from now on, as server `incarnation`. Once per process life."""
    global _installed
    if _installed is not None:
        raise RuntimeError(f"server {_installed.incarnation} is already served by this process")
    _installed = Shards(incarnation, host)


def uninstall() -> None:
    """Serve nothing from now on; answers that come later are dropped. Idempotent."""
    global _installed
    _installed = None


def greet(*_: object, **__: object) -> tuple[int, int]:
    """(wire format, incarnation of this server, or 0 when it serves nothing). Callers check whom they have reached."""
    return WIRE_FORMAT, _installed.incarnation if _installed else 0


def shards(*_: object, **__: object) -> Shards | None:
    """The object that the RRef of a connection stands for."""
    return _installed


@functions.async_execution  # type: ignore[untyped-decorator]
def call(*args: object, **kwargs: object) -> Answered:
    """call(header, payload): hand a request to the host; the future ends with (reply header, payload)."""
    future: Answered = Future()
    answer = _OneAnswer(future)
    served = _installed
    if served is None:
        answer(Reply(refused="this process serves no shards"), payloads.empty())
        return future
    try:
        if kwargs or len(args) != 2:
            raise WireError(f"call: got {len(args)} arguments, expected a header and a payload")
        request, payload = from_wire(args[0]), payloads.check(args[1])
    except WireError as error:
        answer(Reply(refused=plain(str(error))), payloads.empty())
        return future
    dispatch(served.host, request, payload, answer)
    return future


def dispatch(host: ShardHost, request: Request, payload: Tensor, answer: Answer) -> None:
    """`host.submit`, and a refusing answer should it raise in spite of its contract."""
    try:
        host.submit(request, payload, answer)
    except Exception as error:
        log.exception("host failed on a request of incarnation %d", request.caller.incarnation)
        answer(Reply(refused=plain(f"internal error: {error}")), payloads.empty())


class _OneAnswer:
    """Completes a future once and lets go of it, so that a host that keeps the answer keeps no payload alive."""

    __slots__ = ("_future", "_lock")

    def __init__(self, future: Answered) -> None:
        self._future: Answered | None = future
        self._lock = threading.Lock()  # guards _future; never held while it is completed

    def __call__(self, reply: Reply, payload: Tensor) -> None:
        with self._lock:
            future, self._future = self._future, None
        if future is None:
            log.error("second answer to one request dropped")
            return
        try:
            future.set_result((reply_to_wire(reply), payloads.check(payload)))
        except WireError as error:
            log.error("answer can't be sent: %s", error)
            future.set_result((reply_to_wire(Reply(refused=plain(f"internal error: {error}"))), payloads.empty()))


ENDPOINTS = (greet, shards, call)
"""Everything that the unpickler lets a caller name."""
