"""Foreign errors become ours in one place."""

from __future__ import annotations

import pytest
from torch.futures import Future

from ps.clock import Deadline, MonotonicClock
from ps.errors import CallTimeout, PeerLost, PsError, Refused, WireError
from ps.rpc import payload as payloads
from ps.rpc.forks import ForkGuard
from ps.rpc.tickets import FutureTicket, LocalTicket, map_error
from ps.rpc.wire import Reply, reply_to_wire
from ps.types import Incarnation

SERVER = Incarnation(5)
CLOCK = MonotonicClock()
GUARD = ForkGuard()


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("RPCErr:1:RPC ran for more than set timeout (100 ms) and will now be marked with an error", CallTimeout),
        ("eof (this error originated at tensorpipe/transport/uv/connection_impl.cc:132)", PeerLost),
        ("ECONNREFUSED: connection refused (this error originated at tensorpipe/…)", PeerLost),
        ("ECONNRESET: connection reset by peer", PeerLost),
        ("EHOSTUNREACH: host is unreachable", PeerLost),
        ("EPIPE: broken pipe", PeerLost),
        ("pipe closed (this error originated at tensorpipe/core/pipe_impl.cc:356)", PeerLost),
        ("Could not find destination id 16384", PeerLost),
        ("RPCErr:2:something else", PeerLost),
        ("", PeerLost),
        ("UnpicklingError: torch-ps refuses builtins.eval in a message", Refused),
        ("On WorkerInfo(id=1, name=s:1):\nTypeError('x')", Refused),
    ],
)
def test_every_text_has_a_meaning(text: str, kind: type[PsError]) -> None:
    """Timeouts, broken connections and unreadable messages are told apart; all name the server."""
    mapped = map_error(RuntimeError(text), SERVER)
    assert type(mapped) is kind
    assert "server 5" in str(mapped)


def ticket(future: Future[object], lost: list[PeerLost] | None = None) -> FutureTicket:
    return FutureTicket(future, SERVER, GUARD, CLOCK, (lost if lost is not None else []).append)


def soon() -> Deadline:
    return Deadline.after(CLOCK, 5)


def test_only_a_broken_connection_is_reported_lost() -> None:
    """A timeout does not condemn the alias, an end of file does."""
    lost: list[PeerLost] = []
    for text in ("RPCErr:1:late", "eof"):
        future: Future[object] = Future()
        future.set_exception(RuntimeError(text))
        with pytest.raises((CallTimeout, PeerLost)):
            ticket(future, lost).result(soon())
    assert len(lost) == 1
    assert "eof" in str(lost[0])


@pytest.mark.parametrize("value", [None, 1, (), (1, 2, 3), ((1, 2), payloads.empty()), (reply_to_wire(Reply()), b"x")])
def test_malformed_answers_are_wire_errors(value: object) -> None:
    """What a server sends is checked as well."""
    future: Future[object] = Future()
    future.set_result(value)
    with pytest.raises(WireError):
        ticket(future).result(soon())


def test_ticket_of_an_open_future_is_not_done() -> None:
    """`done` follows the future."""
    future: Future[object] = Future()
    made = ticket(future)
    assert not made.done()
    future.set_result((reply_to_wire(Reply()), payloads.empty()))
    assert made.done()
    assert made.result(soon())[0] == Reply()


def test_first_local_answer_counts() -> None:
    """Later answers and errors change nothing."""
    made = LocalTicket(SERVER, GUARD, CLOCK, 5)
    made.answer(Reply(refused="one"), payloads.empty())
    made.answer(Reply(refused="two"), payloads.empty())
    made.fail(PeerLost("closed"))
    assert made.result(soon())[0].refused == "one"
