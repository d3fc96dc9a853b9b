"""One table of cases over every `Transport`: what holds in one process holds over RPC."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pytest
import torch

from ps.errors import CallTimeout, PeerLost, WireError
from ps.rpc import payload as payloads
from ps.rpc.local import LocalTransport
from ps.rpc.transport import Ticket, Transport
from ps.rpc.wire import Caller, Hello, Pull, Request, Status
from ps.types import Incarnation, ShardId, Version
from tests.support import echo
from tests.support.rpc import Child, client, eventually, within

SERVER = Incarnation(3)
SECRET = bytes(range(16))


@dataclass
class Net:
    """A transport, and where its server is."""

    transport: Transport
    address: str

    def connect(self) -> None:
        self.transport.connect(SERVER, "echo-server", self.address, SECRET, timeout_s=60)

    def send(self, request: Request, payload: torch.Tensor | None = None, timeout_s: float = 60) -> Ticket:
        return self.transport.submit(SERVER, request, payload, timeout_s=timeout_s)

    def release(self, ticket: Ticket) -> None:
        """Have parked requests answered until `ticket` is; requests of one caller may overtake each other."""

        def asked() -> bool:
            self.send(echo.push(echo.RELEASE)).result(within())
            return ticket.done()

        eventually(asked)


@pytest.fixture(scope="module")
def rpc_server() -> Iterator[str]:
    with Child("-m", "tests.support.echo_server", str(SERVER)) as child:
        yield child.line()
        code, out, err = child.finish()
    assert (code, out.strip()) == (0, "closed")
    assert "[W" not in err


@pytest.fixture(params=["local", "rpc"])
def net(request: pytest.FixtureRequest, rpc_server: str) -> Iterator[Net]:
    if request.param == "rpc":
        made = Net(client(), rpc_server)
        made.connect()
        yield made
        made.transport.disconnect(SERVER)
        return
    host = echo.EchoHost()
    made = Net(LocalTransport({SERVER: host}, Incarnation(77)), "")
    made.connect()
    yield made
    made.transport.close()
    host.close()


def some_bytes(count: int, seed: int = 0) -> torch.Tensor:
    return payloads.over(np.random.default_rng(seed).integers(0, 256, count, dtype=np.uint8))


@pytest.mark.parametrize("count", [0, 1, 64, 3_000_000])
def test_payload_comes_back_intact(net: Net, count: int) -> None:
    """Bytes of any length, none included, arrive as they left, in a tensor that owns its storage."""
    sent = some_bytes(count)
    reply, got = net.send(echo.push(echo.ECHO, sequence=5), sent).result(within())
    assert torch.equal(got, sent)
    assert payloads.check(got) is got
    assert reply.shards[0].next_sequence == 6


def test_no_payload_is_an_empty_one(net: Net) -> None:
    """None and an empty payload mean the same."""
    _, got = net.send(echo.push(echo.ECHO)).result(within())
    assert got.dtype == torch.uint8
    assert got.shape == (0,)


def test_slice_of_a_buffer_travels_alone(net: Net) -> None:
    """A slice made by `over` carries its own bytes only."""
    buffer = some_bytes(1000)
    _, got = net.send(echo.push(echo.ECHO), payloads.over(buffer, 100, 164)).result(within())
    assert torch.equal(got, buffer[100:164])


def test_payload_that_drags_its_buffer_is_refused(net: Net) -> None:
    """A plain slice is refused before it is sent."""
    with pytest.raises(WireError, match="own exactly its storage"):
        net.send(echo.push(echo.ECHO), some_bytes(1000)[100:900])


def test_every_kind_of_request_arrives(net: Net) -> None:
    """Records survive the way there and the replies the way back."""
    caller = Caller(incarnation=Incarnation(77), secret=b"", map_epoch=9)
    shards = ((ShardId(echo.ECHO), 3), (ShardId(40), 1))
    reply, _ = net.send(Hello(caller=caller, shards=shards)).result(within())
    assert [(s.shard, s.status, s.version) for s in reply.shards] == [
        (0, Status.OK, Version(0, 0)), (40, Status.OK, Version(0, 0)),
    ]  # fmt: skip
    pull = Pull(caller=caller, shards=((ShardId(echo.ECHO), 3, None), (ShardId(2), 3, Version(3, 8))))
    reply, _ = net.send(pull).result(within())
    assert [s.version for s in reply.shards] == [Version(0, 0), Version(3, 8)]


def test_transport_shows_the_secret_of_the_connection(net: Net) -> None:
    """The caller's record needs no secret: `connect` has been given it."""
    _, shown = net.send(echo.push(echo.SECRET)).result(within())
    assert bytes(shown.numpy()) == SECRET


def test_answers_belong_to_their_requests(net: Net) -> None:
    """Concurrent requests from several threads each get their own answer, whatever the order."""
    wrong: list[int] = []

    def caller(base: int) -> None:
        mode = echo.ELSEWHERE if base % 2 else echo.ECHO
        payload = {n: some_bytes(1000 + n, n) for n in range(base, base + 10)}
        tickets = {n: net.send(echo.push(mode, sequence=n), payload[n]) for n in payload}
        for n, ticket in tickets.items():
            reply, got = ticket.result(within())
            if reply.shards[0].next_sequence != n + 1 or not torch.equal(got, payload[n]):
                wrong.append(n)

    threads = [threading.Thread(target=caller, args=(base,), name=f"caller-{base}") for base in (0, 11, 20, 31)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert wrong == []
    assert not any(thread.is_alive() for thread in threads)


def test_late_answer_from_another_thread(net: Net) -> None:
    """A request may stay open while others are answered, and be answered from another request's thread."""
    parked = net.send(echo.push(echo.PARK, sequence=1), some_bytes(10))
    net.send(echo.push(echo.ECHO)).result(within())
    assert not parked.done()
    net.release(parked)
    reply, got = parked.result(within())
    assert parked.done()
    assert reply.shards[0].next_sequence == 2
    assert torch.equal(got, some_bytes(10))


def test_result_may_be_asked_again(net: Net) -> None:
    """A ticket keeps its answer."""
    ticket = net.send(echo.push(echo.ECHO), some_bytes(5))
    assert torch.equal(ticket.result(within())[1], ticket.result(within())[1])


@pytest.mark.parametrize(("mode", "fenced"), [(echo.REFUSE, False), (echo.FENCE, True)])
def test_refusal_is_an_answer(net: Net, mode: int, fenced: bool) -> None:
    """A refusal comes back as a reply."""
    reply, got = net.send(echo.push(mode)).result(within())
    assert reply.refused == "not today? ?"
    assert (reply.fenced, got.numel()) == (fenced, 0)


def test_host_that_raises_is_a_refusal(net: Net, caplog: pytest.LogCaptureFixture) -> None:
    """A bug in the host does not reach the caller as an exception, and does not end the server."""
    reply, _ = net.send(echo.push(echo.RAISE)).result(within())
    assert reply.refused == "internal error: mode 6"
    assert not net.send(echo.push(echo.ECHO)).result(within())[0].refused


def test_second_answer_is_dropped(net: Net) -> None:
    """A host that answers twice harms nobody."""
    reply, _ = net.send(echo.push(echo.TWICE, sequence=8)).result(within())
    assert reply.shards[0].next_sequence == 9
    assert not net.send(echo.push(echo.ECHO)).result(within())[0].refused


def test_answer_that_drags_its_buffer_is_a_refusal(net: Net) -> None:
    """Replies obey the payload rules as well."""
    reply, _ = net.send(echo.push(echo.UNOWNED)).result(within())
    assert "own exactly its storage" in reply.refused


def test_no_answer_within_the_deadline(net: Net) -> None:
    """`result` ends at its deadline; the ticket may still be answered later."""
    ticket = net.send(echo.push(echo.PARK, sequence=3))
    with pytest.raises(CallTimeout):
        ticket.result(within(0.01))
    net.release(ticket)
    assert ticket.result(within())[0].shards[0].next_sequence == 4


def test_no_answer_within_the_timeout_of_the_request(net: Net) -> None:
    """The request's own timeout ends the ticket, however long its holder would wait."""
    ticket = net.send(echo.push(echo.PARK), timeout_s=0.05)
    with pytest.raises(CallTimeout):
        ticket.result(within())
    assert ticket.done()


def test_disconnected_server_can_not_be_called(net: Net) -> None:
    """After `disconnect` only `connect` brings a server back; unknown servers are lost from the start."""
    net.transport.disconnect(SERVER)
    net.transport.disconnect(SERVER)
    with pytest.raises(PeerLost, match="connect"):
        net.send(echo.push(echo.ECHO))
    net.connect()
    assert net.send(echo.push(echo.ECHO)).result(within())[0].shards


def test_connecting_again_replaces_the_connection(net: Net) -> None:
    """Requests in flight on the older connection still get their answers."""
    parked = net.send(echo.push(echo.PARK, sequence=1))
    net.connect()
    net.release(parked)
    assert parked.result(within())[0].shards[0].next_sequence == 2


def test_closed_local_transport() -> None:
    """After `close` open requests end with `PeerLost`, new ones too, and closing again does nothing."""
    host = echo.EchoHost()
    transport = LocalTransport({SERVER: host}, Incarnation(77))
    transport.connect(SERVER, "", "", SECRET, timeout_s=1)
    parked = transport.submit(SERVER, echo.push(echo.PARK), None, timeout_s=60)
    transport.close()
    transport.close()
    host.close()
    with pytest.raises(PeerLost, match="closed"):
        parked.result(within())
    with pytest.raises(PeerLost, match="closed"):
        transport.submit(SERVER, echo.push(echo.ECHO), None, timeout_s=1)
    with pytest.raises(PeerLost, match="closed"):
        transport.connect(SERVER, "", "", SECRET, timeout_s=1)
