"""Start and stop of the process's one RPC agent, and the transport over it.

A process has at most one agent in its life: torch keeps state about references and autograd that a second one would
inherit. Leaving is `close`; should the agent hang in it, the process has to end with `os._exit` (`RpcTransport.wedged`
tells). Everything with a private name is in `torch_private`.
"""

from __future__ import annotations

import atexit
import logging
import threading
import weakref

from torch import Tensor

from ps import net
from ps.clock import Clock, Deadline, MonotonicClock
from ps.errors import AddressError, ConfigError, PeerLost
from ps.rpc import endpoints, torch_private
from ps.rpc import payload as payloads
from ps.rpc.forks import ForkGuard
from ps.rpc.handle import Connection
from ps.rpc.membership import Star, rpc_name
from ps.rpc.transport import ShardHost, Ticket
from ps.rpc.wire import Request
from ps.types import MAX_INCARNATION, Incarnation

log = logging.getLogger(__name__)

CLOSE_TIMEOUT_S = 5.0
"""Bound of `close`. Normally it takes about 10 ms."""

TRANSPORTS = ("shm", "ibv", "uv")
"""TensorPipe's transports; the last is the one that every build has."""

CHANNELS = ("cma", "mpt_uv", "basic")
"""TensorPipe's channels between CPUs; the last is the one that every build has."""

_opened = threading.Lock()  # taken once, for ever, by the first agent of the process


class RpcTransport:
    """`Transport` over torch RPC; made by `open_rpc`. Thread-safe.

    Reconnecting to a server is `connect` again: it registers the server under a fresh alias, and only when that has
    answered does it replace the older connection.
    """

    def __init__(self, agent: torch_private.Agent, incarnation: Incarnation, clock: Clock) -> None:
        self.incarnation = incarnation
        self.wedged = False
        """True when the agent did not end within `CLOSE_TIMEOUT_S`: leave by `os._exit`."""
        self._agent = agent
        self._star = Star(agent)
        self._clock = clock
        self._guard = ForkGuard()
        self._peers: dict[Incarnation, Connection] = {}
        self._closed = False
        self._lock = threading.Lock()  # guards _peers and _closed; never held across a call

    @property
    def address(self) -> str:
        """TensorPipe address of this process, e.g. `uv://10.0.0.5:40733`."""
        return self._agent.url

    def connect(self, server: Incarnation, name: str, address: str, secret: bytes, *, timeout_s: float) -> None:
        """See `Transport.connect`. Raises `Refused` when another server answers at the address."""
        self._guard.check()
        self._check_open(server)
        deadline = Deadline.after(self._clock, timeout_s)
        connection = Connection(self._star, server, name, address, secret, guard=self._guard, clock=self._clock)
        try:
            connection.open(deadline)
        except BaseException:
            connection.mark_broken(PeerLost(f"server {server}: never connected"))
            connection.close()
            raise
        with self._lock:
            older = self._peers.get(server)
            self._peers[server] = connection
        if older is not None:
            older.mark_broken(PeerLost(f"server {server}: connected anew"))
            older.close()

    def disconnect(self, server: Incarnation) -> None:
        """See `Transport.disconnect`."""
        self._guard.check()
        with self._lock:
            connection = self._peers.pop(server, None)
        if connection is not None:
            connection.close()

    def submit(self, server: Incarnation, request: Request, payload: Tensor | None, *, timeout_s: float) -> Ticket:
        """See `Transport.submit`. Raises `WireError` for a payload that does not own exactly its storage."""
        self._guard.check()
        checked = payloads.empty() if payload is None else payloads.check(payload)
        connection = self._peers.get(server)
        if connection is None:
            self._check_open(server)
            raise PeerLost(f"server {server}: not connected; call connect first")
        return connection.submit(request, checked, timeout_s)

    def close(self) -> None:
        """See `Transport.close`. Requests in flight end with `PeerLost`. Takes at most `CLOSE_TIMEOUT_S`."""
        with self._lock:
            if self._closed or self._guard.forked:
                return
            self._closed = True
            peers, self._peers = list(self._peers.values()), {}
        endpoints.uninstall()
        for connection in peers:
            connection.mark_broken(PeerLost(f"server {connection.server}: the transport is closed"))
        self._shut_down()

    def _shut_down(self) -> None:
        """torch's shutdown waits for running handlers without a bound, so it runs on a thread that can be left."""
        watched = threading.Thread(target=self._agent.shutdown, name="ps-rpc-shutdown", daemon=True)
        try:
            watched.start()
        except RuntimeError:  # newer Pythons start no thread at interpreter shutdown
            self._agent.shutdown()
            return
        watched.join(CLOSE_TIMEOUT_S)
        self.wedged = watched.is_alive()
        if self.wedged:
            log.error("the RPC agent did not end within %.0f s; the process must leave with os._exit", CLOSE_TIMEOUT_S)

    def _check_open(self, server: Incarnation) -> None:
        if self._closed:
            raise PeerLost(f"server {server}: the transport is closed")


def open_rpc(
    *,
    incarnation: Incarnation,
    name: str,
    host_ip: str,
    interface: str = "",
    transports: tuple[str, ...] = ("uv",),
    channels: tuple[str, ...] = ("basic",),
    shard_host: ShardHost | None = None,
    rpc_threads: int = 4,
    clock: Clock | None = None,
) -> RpcTransport:
    """Start the process's RPC agent; with a `shard_host` this process also serves it. At most once per process.

    `host_ip` is the address at which others reach this host, `interface` the network interface that has it (empty:
    looked up). `transports` and `channels` are TensorPipe's, best first, and must be the same on every member: peers
    without a common one abort. Raises `AddressError` or `ConfigError`. The transport closes itself at exit.
    """
    torch_private.require()
    _check_backends(transports, channels)
    if not 0 < incarnation <= MAX_INCARNATION:
        raise ConfigError(f"incarnation {incarnation} is not from 1 to {MAX_INCARNATION}")
    if interface:
        net.address_of(interface)  # a misspelt one would silently become 127.0.0.1
    device = interface or net.interface_of(host_ip)
    if torch_private.agent_running() or not _opened.acquire(blocking=False):
        raise ConfigError(
            "this process has, or had, an RPC agent; there can be one per process life: use a new process"
        )
    torch_private.quiet_logs()
    torch_private.restrict_unpickling(endpoints.ENDPOINTS)
    if shard_host is not None:
        endpoints.install(shard_host, incarnation)
    agent = torch_private.Agent(
        name=rpc_name(name, incarnation), id=incarnation, interface=device,
        transports=transports, channels=channels, threads=max(2, rpc_threads),
    )  # fmt: skip
    transport = RpcTransport(agent, incarnation, clock or MonotonicClock())
    atexit.register(_close, weakref.ref(transport))
    try:
        _check_address(agent.url, host_ip, device)
    except AddressError:
        transport.close()
        raise
    log.info("RPC agent %s listens at %s", rpc_name(name, incarnation), agent.url)
    return transport


def _close(reference: weakref.ref[RpcTransport]) -> None:
    transport = reference()
    if transport is not None:
        transport.close()


def _check_backends(transports: tuple[str, ...], channels: tuple[str, ...]) -> None:
    for kind, given, known in (("transports", transports, TRANSPORTS), ("channels", channels, CHANNELS)):
        if not given or given[-1] != known[-1] or not set(given) <= set(known):
            raise ConfigError(
                f"TensorPipe {kind} {given}: choose from {known}, with {known[-1]!r}, which every member has, last"
            )


def _check_address(url: str, host_ip: str, interface: str) -> None:
    """TensorPipe falls back to 127.0.0.1 silently, and takes the first address of an interface that has several."""
    bound = url.removeprefix("uv://").rpartition(":")[0].strip("[]")
    if not net.is_loopback(host_ip) and (net.is_loopback(bound) or net.is_link_local(bound)):
        raise AddressError(
            f"RPC listens at {bound} although this host is to be reached at {host_ip} (interface {interface}): other "
            f"hosts could not dial it; {net.ADVICE}"
        )
    if (":" in bound) != (":" in host_ip):
        raise AddressError(
            f"RPC listens at {bound}, the first address of interface {interface}, which is of another family than "
            f"{host_ip}; pass --advertise {bound}, or --interface of one whose first address is of that family"
        )
    if bound != host_ip:
        log.warning("RPC listens at %s, the first address of interface %s, not at %s", bound, interface, host_ip)
