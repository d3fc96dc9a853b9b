"""How the ranks of a process group find each other: over the group itself, once."""

from __future__ import annotations

import secrets
import socket
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import cast

from torch import distributed

from ps import net
from ps.clock import Deadline, MonotonicClock
from ps.errors import ConfigError, GroupLost
from workers.config import WorkerConfig
from workers.group_watch import LeaderWatch
from workers.ranks import PATIENCE_S, GroupHandle, Ranks

_MEET_S = 60.0
"""How long ranks may take to call rank 0."""
_TOKEN_BYTES = 32
_KEEPALIVE = (("TCP_KEEPIDLE", 10), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 4))
"""A host that has vanished is noticed after about 30 s."""


def meet(config: WorkerConfig) -> Ranks:
    """Connect the ranks of the default process group; all of them call it. Raises `ConfigError` or what rank 0 does."""
    rank, size = distributed.get_rank(), distributed.get_world_size()
    group = distributed.new_group(backend="gloo", timeout=timedelta(seconds=PATIENCE_S))
    assert isinstance(group, GroupHandle)
    server, box = _listen(config) if rank == 0 else (None, [None])
    distributed.broadcast_object_list(box, src=0, group=group)
    found = box[0]
    if isinstance(found, BaseException):
        raise found
    host, port, token = cast("tuple[str, int, bytes]", found)
    if server is None:
        line = _prepared(socket.create_connection((host, port), _MEET_S))
        line.send_bytes(token + rank.to_bytes(4, "little"))
        return Ranks(rank, size, {0: line}, group=group, watch=LeaderWatch(line))
    with server:
        return Ranks(rank, size, _accept(server, size, token), group=group)


def _listen(config: WorkerConfig) -> tuple[socket.socket | None, list[object]]:
    """Rank 0's listening socket, and what the others need to know to call it: or the error, which all raise."""
    try:
        host = _own_host(config)
        server = socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
        return server, [(host, server.getsockname()[1], secrets.token_bytes(_TOKEN_BYTES))]
    except (OSError, ConfigError) as error:
        return None, [ConfigError(f"rank 0 of the process group can't be reached by the others: {error}")]


def _own_host(config: WorkerConfig) -> str:
    """An address of this host that the other ranks can dial."""
    if config.launched_here == config.launched_ranks > 1:
        return "127.0.0.1"
    coordinator = config.coordinator
    if coordinator is None:
        return net.route_address(config.launched_at or "127.0.0.1")
    return net.own_address(coordinator.host, advertise=config.advertise, interface=config.interface)


def _accept(server: socket.socket, size: int, token: bytes) -> dict[int, Connection]:
    """Lines to all followers, by rank. Whoever doesn't show the token is hung up on."""
    clock = MonotonicClock()
    deadline = Deadline.after(clock, _MEET_S)
    lines: dict[int, Connection] = {}
    while len(lines) < size - 1:
        server.settimeout(max(0.001, deadline.remaining_s(clock)))
        try:
            line = _prepared(server.accept()[0])
        except TimeoutError:
            missing = sorted(set(range(1, size)) - set(lines))
            raise GroupLost(f"ranks {missing} of the process group did not call within {_MEET_S:.0f} s") from None
        shown = _first_bytes(line, deadline.remaining_s(clock))
        rank = int.from_bytes(shown[_TOKEN_BYTES:], "little")
        if secrets.compare_digest(shown[:_TOKEN_BYTES], token) and 0 < rank < size:
            lines[rank] = line
        else:
            line.close()
    return dict(sorted(lines.items()))


def _first_bytes(line: Connection, timeout_s: float) -> bytes:
    try:
        return line.recv_bytes(_TOKEN_BYTES + 4) if line.poll(timeout_s) else b""
    except (EOFError, OSError):
        return b""


def _prepared(connected: socket.socket) -> Connection:
    connected.setblocking(True)
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in _KEEPALIVE:
        if hasattr(socket, option):
            connected.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
    return Connection(connected.detach())
