"""Aliases are never used twice, tables change alone, names are ones that torch takes."""

from __future__ import annotations

import re
import threading
from typing import cast

import pytest

from ps.errors import PeerLost
from ps.rpc.membership import Gate, Star, rpc_name
from ps.rpc.torch_private import Agent, Peer
from ps.types import FIRST_ALIAS, LAST_ALIAS, Incarnation

ADDRESS = "uv://10.0.0.5:40733"


class FakeAgent:
    """Notes what it is told."""

    def __init__(self) -> None:
        self.log: list[tuple[object, ...]] = []

    def add(self, name: str, id: int, url: str) -> Peer:
        self.log.append(("add", name, id, url))
        return cast(Peer, (name, id))

    def remove(self, peer: Peer) -> None:
        self.log.append(("remove", peer))


def star(agent: FakeAgent, first: int = FIRST_ALIAS, last: int = LAST_ALIAS) -> Star:
    return Star(cast(Agent, agent), first=first, last=last)


def test_each_connection_gets_an_alias_of_its_own() -> None:
    """Adding the same server again gives another id and another name: torch never repairs an old one."""
    agent = FakeAgent()
    made = star(agent)
    peers = [made.add(Incarnation(3), "server-1", ADDRESS) for _ in range(2)]
    made.remove(peers[0], [])
    made.add(Incarnation(3), "server-1", ADDRESS)
    assert agent.log == [
        ("add", "server_1:3:16384", 16384, ADDRESS),
        ("add", "server_1:3:16385", 16385, ADDRESS),
        ("remove", ("server_1:3:16384", 16384)),
        ("add", "server_1:3:16386", 16386, ADDRESS),
    ]


def test_aliases_run_out_with_a_sentence() -> None:
    """The id space is finite, and the last one is still usable."""
    made = star(FakeAgent(), first=FIRST_ALIAS, last=FIRST_ALIAS + 1)
    for _ in range(2):
        made.add(Incarnation(1), "s", ADDRESS)
    with pytest.raises(PeerLost, match="restart this process"):
        made.add(Incarnation(1), "s", ADDRESS)


@pytest.mark.parametrize(
    "address",
    ["", "uv://host.name:1", "uv://10.0.0.5:0", "uv://10.0.0.5", "tcp://10.0.0.5:1", "10.0.0.5:1", "uv://::1:5"],
)
def test_addresses_that_torch_would_choke_on(address: str) -> None:
    """Only numeric addresses with a port can be dialled; nothing else reaches torch."""
    agent = FakeAgent()
    with pytest.raises(PeerLost, match="uv://IP:PORT"):
        star(agent).add(Incarnation(1), "s", address)
    assert agent.log == []


def test_ipv6_addresses_pass() -> None:
    """Brackets around IPv6."""
    star(FakeAgent()).add(Incarnation(1), "s", "uv://[2001:db8::1]:40733")


def test_references_are_dropped_while_the_tables_are_held() -> None:
    """A destructor of a reference reads the tables, so nothing may change them meanwhile."""
    held: list[bool] = []
    made = star(FakeAgent())

    class Reference:
        def __del__(self) -> None:
            held.append(made.gate._changing)

    made.remove(made.add(Incarnation(1), "s", ADDRESS), [Reference()])
    assert held == [True]


def test_names_that_torch_takes() -> None:
    """A dash would break every later join; other signs are refused by torch."""
    assert rpc_name("server-1.zone/a é", 5, 16384) == "server_1_zone_a__:5:16384"
    assert re.fullmatch(r"[A-Za-z0-9_:]{1,127}", rpc_name("x" * 500, 16383, 32767))


def test_gate_lets_calls_in_together_and_changes_alone() -> None:
    """A change waits for calls being issued, and calls wait for the change."""
    gate = Gate()
    order: list[str] = []
    inside = threading.Event()

    def change() -> None:
        with gate.changing():
            order.append("change")

    def issue() -> None:
        inside.set()
        gate.enter()
        order.append("issue")
        gate.leave()

    gate.enter()
    gate.enter()
    changer = threading.Thread(target=change, name="changer")
    changer.start()
    while not gate._waiting:
        threading.Event().wait(0.001)
    issuer = threading.Thread(target=issue, name="issuer")
    issuer.start()
    assert inside.wait(5)
    gate.leave()
    assert order == []
    gate.leave()
    for thread in (changer, issuer):
        thread.join(5)
    assert order == ["change", "issue"]


def test_gate_gives_way_after_an_error() -> None:
    """An exception inside a change does not lock everybody out."""
    gate = Gate()
    with pytest.raises(ValueError, match="inside"), gate.changing():
        raise ValueError("inside")
    gate.enter()
    gate.leave()
    with gate.changing():
        pass
