"""Ids, roles and small records that every layer shares; standard library only."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple, NewType, TypeAlias

Incarnation = NewType("Incarnation", int)
"""Never-reused number of one process life, 1..16383. It is also the process's RPC agent id."""

ShardId = NewType("ShardId", int)
"""Index of a shard in its plan, from 0."""

HyperValue: TypeAlias = "float | int | bool | str | tuple[float | None, ...] | None"
Hyper: TypeAlias = "tuple[tuple[str, HyperValue], ...]"
"""Hyper-parameters of one param group: (key, value) pairs in the order of the class's `defaults`."""

DENSE = -1
"""Number of rows in a gradient that doesn't travel as rows but holds all elements."""

MAX_INCARNATION = 16383
"""RPC ids are int16; the upper half is kept for a caller's local aliases of servers."""

FIRST_ALIAS = 16384
LAST_ALIAS = 32767


class Version(NamedTuple):
    """Version of a shard, compared lexicographically.

    `epoch` rises whenever the shard gets another primary or is restored; `counter` counts applied
    pushes within the epoch. Counters of different epochs say nothing about each other.
    """

    epoch: int
    counter: int


class Role(Enum):
    """What a process does in the job."""

    COORDINATOR = "coordinator"
    SERVER = "server"
    WORKER = "worker"
    OBSERVER = "observer"
    """Reads weights (for example `psctl export`); never counted as a worker, never pushes."""


class MemberState(Enum):
    """Life of a member as the coordinator sees it; `LEFT` and `DEAD` are final."""

    JOINING = "joining"
    """Has an incarnation; its RPC agent is not announced yet."""
    LIVE = "live"
    DRAINING = "draining"
    """Asked to leave; finishes what it is doing."""
    LEFT = "left"
    """Said goodbye."""
    DEAD = "dead"
    """Evicted: lease expired, or its process was reported gone."""


class JobState(Enum):
    """State of the whole job, announced by the coordinator."""

    WAITING = "waiting"
    """Not enough servers, no model, or initial weights not complete yet."""
    RUNNING = "running"
    FINISHED = "finished"
    FAILED = "failed"
    INTERRUPTED = "interrupted"

    @property
    def over(self) -> bool:
        """True for the three final states."""
        return self in (JobState.FINISHED, JobState.FAILED, JobState.INTERRUPTED)


class Part(Enum):
    """A worker's part in clocks and rounds, as the coordinator decides it for all servers."""

    OUT = "out"
    """Nobody waits for it, and it pushes nothing: it waits for data itself."""
    ENTERING = "entering"
    """Its first clock is being agreed on: no server lets others go further, relative to it, than it could start."""
    IN = "in"
    """It counts from the clock that comes with this."""
    KEPT = "kept"
    """As each server has it: the coordinator was restarted, and doesn't know."""


class LeaveReason(Enum):
    """Why a member says goodbye."""

    DONE = "done"
    """Its script ran to the end."""
    DRAINED = "drained"
    """It was asked to stop (SIGTERM) and handed its work back."""
    FAILED = "failed"
    """Its script raised, or exited with a code other than 0."""


@dataclass(frozen=True, slots=True)
class Address:
    """A TCP address, printed and parsed as `host:port`, IPv6 hosts in brackets."""

    host: str
    port: int

    @classmethod
    def parse(cls, text: str) -> Address:
        """Parse `host:port` or `[v6]:port`; raises ValueError naming the text and what is expected."""
        host, sep, port = text.strip().rpartition(":")
        host = host.removeprefix("[").removesuffix("]")
        if not sep or not host or not port.isdigit() or not 0 < int(port) < 65536:
            raise ValueError(f"address {text!r} is not HOST:PORT with a port from 1 to 65535, e.g. 10.0.0.5:7777")
        return cls(host, int(port))

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"
