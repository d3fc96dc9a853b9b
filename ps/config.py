"""Settings of the coordinator and of servers: frozen dataclasses, checked when made.

Command-line flags win over `PS_*` environment variables, which win over defaults. Only `environment` reads the
environment.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from ps.errors import ConfigError
from ps.types import Address

CONSISTENCIES = ("asp", "ssp:S", "bsp", "bsp:backup=B")
"""Consistency choices that are built; S is a number of clocks, B of workers."""

_CONSISTENCY = re.compile(r"(asp|bsp)|(ssp):([0-9]{1,6})|(bsp):backup=([0-9]{1,6})")


def parse_consistency(text: str) -> tuple[str, int]:
    """Kind and number of a consistency choice: `("ssp", 3)`, `("bsp", 1)`. Raises `ConfigError` for others."""
    found = _CONSISTENCY.fullmatch(text)
    if found is None:
        hint = "; S is how many steps a worker may be ahead, e.g. ssp:3" if text.startswith("ssp") else ""
        raise ConfigError(f"--consistency {text!r} is not available; choose one of: {', '.join(CONSISTENCIES)}{hint}")
    kind, number = next((found[at], found[at + 1]) for at in (1, 2, 4) if found[at])
    return kind, 0 if kind == found[1] else int(number)


def environment() -> Mapping[str, str]:
    """The process's `PS_*` variables, as a copy."""
    return {key: value for key, value in os.environ.items() if key.startswith("PS_")}


@dataclass(frozen=True, slots=True, kw_only=True)
class CoordinatorConfig:
    """What `psctl coordinator` needs."""

    host: str = "127.0.0.1"
    """Address to listen on."""
    port: int = 0
    """0 = any free port; the real one is printed and written to `address_file`."""
    state: Path
    """SQLite file; `-wal` and `-shm` beside it belong to it."""
    address_file: Path | None = None
    """Where to write `host:port` as soon as the coordinator listens."""
    summary_file: Path | None = None
    """Where to write `summary.json` when the job is over."""
    servers: int = 1
    """Servers to wait for before the model is placed."""
    min_workers: int = 0
    """Data is handed out only once this many workers are live, so that they start together; later joins are free."""
    consistency: str = "asp"
    exact: bool = False
    shard_bytes: int = 0
    """Target shard size; 0 = chosen from the model's size."""
    heartbeat_s: float = 1.0
    lease_s: float = 10.0
    no_workers_s: float = 60.0
    """A job with work left and no worker for this long has failed."""
    lost_coordinator_s: float = 30.0
    hold: bool = False
    """Stay after the end of the job until released, so that a launcher can save the results."""
    max_members: int = 1024
    transports: tuple[str, ...] = ("uv",)
    channels: tuple[str, ...] = ("basic",)

    def __post_init__(self) -> None:
        parse_consistency(self.consistency)
        if not 0 <= self.port < 65536:
            raise ConfigError(f"--port {self.port} is not from 0 to 65535 (0 = any free port)")
        if self.servers < 1:
            raise ConfigError(f"--servers {self.servers} must be at least 1")
        if self.shard_bytes < 0:
            raise ConfigError(f"--shard-bytes {self.shard_bytes} must be at least 0 (0 = from the model's size)")
        if self.min_workers < 0:
            raise ConfigError(f"--min-workers {self.min_workers} must be at least 0")
        if self.max_members < 1:
            raise ConfigError(f"--max-members {self.max_members} must be at least 1")
        if not self.no_workers_s > 0 or not self.lost_coordinator_s > 0:
            raise ConfigError("--no-workers-s and --lost-coordinator-s must be greater than 0")
        for flag, names, last in (("transports", self.transports, "uv"), ("channels", self.channels, "basic")):
            if names[-1:] != (last,):
                raise ConfigError(f"--{flag} {','.join(names)} must end in {last!r}, which every member has")
        if not 0 < self.heartbeat_s < self.lease_s:
            raise ConfigError(f"--lease-s {self.lease_s} must be longer than --heartbeat-s {self.heartbeat_s} (> 0)")


@dataclass(frozen=True, slots=True, kw_only=True)
class MemberConfig:
    """What every member needs to reach the coordinator and to be reached."""

    coordinator: Address
    name: str = ""
    """Empty: the coordinator chooses."""
    advertise: str = ""
    """IP address for the data plane; empty: the one that routes to the coordinator."""
    interface: str = ""
    """Network interface for the data plane; empty: the one that has the address."""
    join_timeout_s: float = 60.0
    """How long to keep trying to reach the coordinator at the start."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """What `psctl server` needs."""

    member: MemberConfig
    rpc_threads: int = 4
    """Threads that parse requests; they never block."""
    apply_threads: int = 2
    snapshots: int = 3
    """Pooled reply buffers per message layout; when all are on the wire the next reply waits."""
    queue_bytes: int = field(default=1 << 30)
    """Payload bytes accepted and not yet applied; past it pushes are answered BUSY."""

    def __post_init__(self) -> None:
        for flag, value in ("rpc", self.rpc_threads), ("apply", self.apply_threads):
            if value < 1:
                raise ConfigError(f"--{flag}-threads {value} must be at least 1")
        if self.snapshots < 1:
            raise ConfigError(f"--snapshots {self.snapshots} must be at least 1")
