"""Star membership: the servers that this process may call, each under a local alias that is never used twice.

torch RPC never repairs a connection: once broken, an id is dead for ever. So every connection gets an id of its own
from the upper half of the id space, and reconnecting to the same server is registering it again under the next one.
Upstream's lock around its tables does nothing in dynamic groups, hence the gate.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from torch.futures import Future

from ps.errors import PeerLost, TransportError
from ps.rpc.torch_private import Agent, Peer
from ps.types import FIRST_ALIAS, LAST_ALIAS, Incarnation

GATE_TIMEOUT_S = 30.0
"""Bound of a wait for the gate; it is held for microseconds, so running into it is a bug."""


def rpc_name(name: str, *numbers: int) -> str:
    """A name that torch RPC takes: letters, digits, `_`, and the numbers after colons."""
    return ":".join([re.sub(r"[^A-Za-z0-9_]", "_", name)[:80], *map(str, numbers)])


class Gate:
    """Readers–writer gate: many may issue calls at once, or one may change the membership tables.

    A waiting change keeps new calls out. Not re-entrant.
    """

    def __init__(self) -> None:
        self._free = threading.Condition()  # guards the three counters; held for their updates and waits only
        self._issuing = 0
        self._changing = False
        self._waiting = 0

    @contextmanager
    def changing(self) -> Iterator[None]:
        """Hold the tables alone."""
        with self._free:
            self._waiting += 1
            try:
                self._wait(lambda: not self._changing and not self._issuing)
                self._changing = True
            finally:
                self._waiting -= 1
        try:
            yield
        finally:
            with self._free:
                self._changing = False
                self._free.notify_all()

    def enter(self) -> None:
        """Begin to issue a call; `leave` must follow as soon as it is issued, not when it is answered."""
        with self._free:
            if self._changing or self._waiting:
                self._wait(lambda: not self._changing and not self._waiting)
            self._issuing += 1

    def leave(self) -> None:
        """The call is issued."""
        with self._free:
            self._issuing -= 1
            if not self._issuing and self._waiting:
                self._free.notify_all()

    def _wait(self, ready: Callable[[], bool]) -> None:
        if not self._free.wait_for(ready, GATE_TIMEOUT_S):
            self._free.notify_all()
            raise TransportError(f"the RPC membership tables were not free within {GATE_TIMEOUT_S} s")


class Star:
    """Aliases of servers in one agent. Thread-safe."""

    def __init__(self, agent: Agent, *, first: int = FIRST_ALIAS, last: int = LAST_ALIAS) -> None:
        self.gate = Gate()
        self._agent = agent
        self._next = first
        self._last = last
        self._lock = threading.Lock()  # guards _next

    def add(self, server: Incarnation, name: str, address: str) -> Peer:
        """Register a server under a fresh alias. No packet is sent. Raises `PeerLost` on an unusable address."""
        if not re.fullmatch(r"uv://(\d+\.\d+\.\d+\.\d+|\[[0-9A-Fa-f:.]+(%\w+)?\]):[1-9]\d{0,4}", address):
            raise PeerLost(f"server {server} ({name}): {address!r} is not an address of the form uv://IP:PORT")
        alias = self._fresh()
        with self.gate.changing():
            return self._agent.add(rpc_name(name, server, alias), alias, address)

    def remove(self, peer: Peer, references: list[object]) -> None:
        """Forget an alias for ever; `references` made under it are dropped first, while the tables are held."""
        with self.gate.changing():
            references.clear()
            self._agent.remove(peer)

    def call(
        self, peer: Peer, function: Callable[..., object], args: tuple[object, ...], timeout_s: float
    ) -> Future[object]:
        """`Agent.call` beside which no alias is added or removed."""
        self.gate.enter()
        try:
            return self._agent.call(peer, function, args, timeout_s)
        finally:
            self.gate.leave()

    def reference(self, peer: Peer, function: Callable[..., object], timeout_s: float) -> tuple[object, Future[object]]:
        """`Agent.reference` beside which no alias is added or removed."""
        self.gate.enter()
        try:
            return self._agent.reference(peer, function, timeout_s)
        finally:
            self.gate.leave()

    def _fresh(self) -> int:
        with self._lock:
            if self._next > self._last:
                raise PeerLost("all aliases of this process are used up by reconnects; restart this process")
            self._next += 1
            return self._next - 1
