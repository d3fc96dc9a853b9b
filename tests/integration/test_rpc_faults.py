"""The data plane with real processes: servers killed, frozen, replaced, flooded; the client is this process."""

from __future__ import annotations

import json
import os
import signal
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import pytest
import torch

from ps.errors import CallTimeout, PeerLost, Refused
from ps.rpc import payload as payloads
from ps.rpc.transport import Ticket
from ps.types import Incarnation
from tests.support import echo
from tests.support.rpc import Child, client, eventually, within

SECRET = bytes(16)


@dataclass
class Server:
    """An echo server in a process of its own."""

    child: Child
    incarnation: Incarnation
    address: str

    def connect(self, timeout_s: float = 60) -> None:
        client().connect(self.incarnation, "echo", self.address, SECRET, timeout_s=timeout_s)

    def send(self, mode: int, payload: torch.Tensor | None = None, timeout_s: float = 60) -> Ticket:
        return client().submit(self.incarnation, echo.push(mode), payload, timeout_s=timeout_s)

    def release(self, count: int) -> None:
        """Have `count` requests answered that were sent as PARK or POOL; they may still be on their way."""
        eventually(lambda: int(self.info()["parked"]) == count)
        self.send(echo.RELEASE).result(within())

    def info(self) -> dict[str, str]:
        _, content = self.send(echo.INFO).result(within())
        loaded: dict[str, str] = json.loads(bytes(content.numpy()))
        return loaded


@contextmanager
def serving(incarnation: int, *arguments: str) -> Iterator[Server]:
    with Child("-m", "tests.support.echo_server", str(incarnation), *arguments) as child:
        server = Server(child, Incarnation(incarnation), child.line())
        try:
            yield server
        finally:
            client().disconnect(server.incarnation)


@pytest.fixture(scope="module")
def shared() -> Iterator[Server]:
    """A server for the tests that leave it alive."""
    with serving(100) as server:
        yield server


@pytest.fixture
def server(shared: Server) -> Server:
    shared.connect()
    return shared


def test_killed_server_is_lost_at_once_and_for_ever() -> None:
    """`kill -9` ends the call in flight as `PeerLost`; the alias stays dead until `connect` reaches a successor."""
    with serving(101) as server:
        server.connect()
        ticket = server.send(echo.PARK, payloads.over(np.zeros(1 << 20, dtype=np.uint8)))
        server.child.signal(signal.SIGKILL)
        with pytest.raises(PeerLost, match="server 101"):
            ticket.result(within())
        for _ in range(2):
            with pytest.raises(PeerLost):
                server.send(echo.ECHO).result(within())
        with pytest.raises(PeerLost, match="can't be reached"):
            server.connect()


def test_successor_under_another_incarnation() -> None:
    """A restarted server is another server; a caller that asks for the dead one at its address is told."""
    with serving(102) as old:
        old.connect()
        old.child.signal(signal.SIGKILL)
    with serving(103) as new:
        with pytest.raises(Refused, match=r"expected .* 102"):
            client().connect(Incarnation(102), "echo", new.address, SECRET, timeout_s=60)
        new.connect()
        assert new.send(echo.ECHO).result(within())[0].shards


def test_frozen_server_times_out_and_comes_back_under_a_fresh_alias() -> None:
    """SIGSTOP ends calls by their deadline only; after SIGCONT connecting again gives a working connection."""
    with serving(104) as server:
        server.connect()
        server.child.signal(signal.SIGSTOP)
        with pytest.raises(CallTimeout):
            server.send(echo.ECHO, timeout_s=0.3).result(within())
        with pytest.raises(CallTimeout, match="can't be reached"):
            server.connect(timeout_s=0.3)
        server.child.signal(signal.SIGCONT)
        server.connect()
        sent = payloads.over(np.arange(200_000, dtype=np.uint8))
        _, got = server.send(echo.ECHO, sent).result(within())
        assert torch.equal(got, sent)


def test_servers_come_and_go_during_traffic(server: Server) -> None:
    """Threads that send all the time are not disturbed by servers that are added, replaced and removed."""
    stop = threading.Event()
    payload = payloads.over(np.arange(50_000, dtype=np.uint8))

    def traffic() -> int:
        count = 0
        while not stop.is_set():
            _, got = server.send(echo.ECHO, payload).result(within())
            assert got.numel() == payload.numel()
            count += 1
        return count

    def come_and_go(other: Server) -> None:
        for _ in range(25):
            other.connect()
            other.send(echo.ECHO).result(within())
            other.connect()
            client().disconnect(other.incarnation)

    with serving(105) as one, serving(106) as two, ThreadPoolExecutor(4) as pool:
        running = [pool.submit(traffic) for _ in range(2)]
        changing = [pool.submit(come_and_go, other) for other in (one, two)]
        for change in changing:
            change.result(60)
        stop.set()
        assert all(sender.result(60) > 0 for sender in running)


def test_parked_answers_do_not_use_up_the_pool(server: Server) -> None:
    """200 open requests on a server with 4 RPC threads leave it responsive; all are answered when released."""
    parked = [server.send(echo.PARK) for _ in range(200)]
    for _ in range(20):
        server.send(echo.ECHO).result(within())
    assert not any(ticket.done() for ticket in parked)
    server.release(200)
    assert all(not ticket.result(within())[0].refused for ticket in parked)


def test_references_do_not_pile_up(server: Server) -> None:
    """One RRef per connection: calls make none, and a clean disconnect gives it back."""

    def owned() -> int:
        return int(server.info()["num_owner_rrefs"])

    before = owned()
    for _ in range(5):
        client().disconnect(server.incarnation)
        server.connect()
        for _ in range(20):
            server.send(echo.ECHO).result(within())
    assert owned() <= before + 1


@pytest.mark.parametrize(
    ("function", "arguments"),
    [
        (eval, ("1+1",)),
        (os.system, ("true",)),
        (getattr, (os, "system")),
        (echo.push, (1,)),
        (torch.nn.Linear, (1, 1)),
    ],
    ids=["eval", "os.system", "getattr", "unknown endpoint", "class"],
)
def test_foreign_functions_are_refused_by_a_real_server(
    server: Server, function: object, arguments: tuple[object, ...]
) -> None:
    """Only endpoints can be called: everything else is refused while it is read, and the server goes on."""
    transport = client()
    connection = transport._peers[server.incarnation]
    if arguments and arguments[0] is os:
        arguments = (os.system, "x")  # modules don't pickle
    with pytest.raises(Refused, match="torch-ps refuses"):
        connection._call(function, arguments, 60).value(within())  # type: ignore[arg-type]
    assert server.send(echo.ECHO).result(within())[0].shards


@pytest.mark.parametrize("arguments", [(), (1,), ((1, 2), torch.zeros(3)), ("x", payloads.empty(), 3)], ids=str)
def test_malformed_calls_are_refused_by_a_real_server(server: Server, arguments: tuple[object, ...]) -> None:
    """An endpoint called with anything odd answers a refusal."""
    from ps.rpc import endpoints

    connection = client()._peers[server.incarnation]
    reply, _ = connection._call(endpoints.call, arguments, 60).result(within())
    assert reply.refused


def test_shards_can_not_be_fetched(server: Server) -> None:
    """The object behind the RRef stays where it is."""
    from ps.rpc import endpoints

    connection = client()._peers[server.incarnation]
    with pytest.raises(PeerLost, match="can't be copied"):
        connection._call(endpoints.shards, (), 60).value(within())
    server.connect()
    assert server.send(echo.ECHO).result(within())[0].shards


def test_dead_callers_leave_no_trace() -> None:
    """Answers to callers that were killed go nowhere, quietly, and the server goes on."""
    with serving(107) as server:
        server.connect()
        with Child("-m", "tests.support.rpc_scenarios", "park", "107", server.address) as caller:
            assert caller.line() == "parked"
            caller.signal(signal.SIGKILL)
        server.release(20)
        assert server.send(echo.ECHO).result(within())[0].shards
        client().disconnect(server.incarnation)
        code, out, err = server.child.finish()
    assert (code, out, err) == (0, "closed\n", "")


def test_pooled_answers_come_back() -> None:
    """An alias of a pooled buffer is let go when its answer has left, not before, and when its receiver is dead."""
    with serving(111) as server:
        server.connect()
        ticket = server.send(echo.POOL)
        server.release(1)
        assert int(ticket.result(within())[1].sum()) == 32 << 20
        eventually(lambda: server.info()["aliases_out"] == "0")
        with Child("-m", "tests.support.rpc_scenarios", "pull_large", "111", server.address) as frozen:
            assert frozen.line() == "parked"
            frozen.signal(signal.SIGSTOP)
            server.release(1)
            assert server.info()["aliases_out"] == "1"
            frozen.signal(signal.SIGKILL)
        eventually(lambda: server.info()["aliases_out"] == "0")


def test_garbage_kills_a_server_and_callers_notice() -> None:
    """Stray bytes abort a TensorPipe process (documented); callers get `PeerLost`, and a successor can be reached."""
    with serving(108) as server:
        server.connect()
        ticket = server.send(echo.PARK)
        host, _, port = server.address.removeprefix("uv://").rpartition(":")
        with socket.create_connection((host, int(port)), timeout=10) as stray:
            stray.sendall(b"\xff" * 8 + b"GET / HTTP/1.0\r\n\r\n")
            with pytest.raises(PeerLost):
                ticket.result(within())


def test_server_that_does_not_end_is_left() -> None:
    """A handler that blocks can't hold `close` longer than its bound."""
    with serving(109, "0.5") as server:
        server.connect()
        ticket = server.send(echo.BLOCK)
        eventually(lambda: server.info()["blocked"] == "True")
        code, out, err = server.child.finish()
        assert (code, out) == (0, "wedged\n")
        assert "os._exit" in err
        with pytest.raises(PeerLost):
            ticket.result(within())


def test_unroutable_address_ends_by_the_deadline() -> None:
    """Connecting to nobody is an error that names whom and where."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
        with pytest.raises((PeerLost, CallTimeout), match=f"server 110 .*127.0.0.1:{port} can't be reached"):
            client().connect(Incarnation(110), "echo", f"uv://127.0.0.1:{port}", SECRET, timeout_s=5)
