"""Settings of a worker: frozen dataclass, checked when made. Only `load` reads the environment."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from ps.config import environment
from ps.errors import ConfigError
from ps.types import Address


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerConfig:
    """What `workers.join` needs."""

    coordinator: Address | None = None
    """None: alone, everything in this process."""
    name: str = ""
    """Empty: the coordinator chooses."""
    advertise: str = ""
    """IP address of this host for the data plane; empty: the one that routes to the coordinator."""
    interface: str = ""
    """Network interface for the data plane; empty: the one that has the address."""
    launched_ranks: int = 1
    """Processes that torchrun, or the like, has started together with this one."""
    launched_here: int = 1
    """Those of them that run on this host."""
    launched_at: str = ""
    """Host on which the first of them runs."""
    join_timeout_s: float = 60.0
    """How long to keep trying to reach the coordinator at the start."""
    start_timeout_s: float = 300.0
    """How long `attach` waits for servers to appear and for another worker's initial weights."""
    connect_timeout_s: float = 20.0
    """How long one attempt to connect to a server may take."""
    call_base_s: float = 20.0
    """Deadline of a call to a server, beyond the time its bytes take."""
    floor_bytes_per_s: float = 4e6
    """Slowest link that is waited for: a call's deadline grows by bytes / this."""
    retry_s: float = 120.0
    """How long a step keeps reconnecting and sending again before it gives up."""
    message_bytes: int = 8 << 20
    """Shards of one server are sent together up to about this size."""
    calls_in_flight: int = 4
    """Messages under way to one server."""
    bytes_in_flight: int = 64 << 20
    """Bytes under way to one server; one message is always allowed."""
    rpc_threads: int = 4
    """Threads of this process's RPC agent."""
    lookahead_s: float = 0.3
    """How much data is leased ahead, in seconds of this worker's own pace."""

    def __post_init__(self) -> None:
        for key in ("join_timeout_s", "start_timeout_s", "connect_timeout_s", "call_base_s", "floor_bytes_per_s",
                    "retry_s", "message_bytes", "calls_in_flight", "bytes_in_flight", "rpc_threads",
                    "lookahead_s"):  # fmt: skip
            if not getattr(self, key) > 0:
                raise ConfigError(f"worker setting {key}={getattr(self, key)!r} must be greater than 0")


def load(
    coordinator: str | None = None,
    *,
    name: str = "",
    advertise: str = "",
    interface: str = "",
    env: Mapping[str, str] | None = None,
) -> WorkerConfig:
    """Settings from arguments, else from the environment.

    Variables: `PS_COORDINATOR`, `PS_NAME`, `PS_ADVERTISE`, `PS_INTERFACE`, `PS_JOIN_TIMEOUT_S`; and those of torchrun:
    `RANK`, `WORLD_SIZE`, `LOCAL_WORLD_SIZE`, `MASTER_ADDR`. `env` stands in for the environment in tests.
    Raises `ConfigError` naming the variable or argument.
    """
    env = {**environment(), **_torchrun()} if env is None else env
    address = coordinator if coordinator is not None else env.get("PS_COORDINATOR", "")
    return WorkerConfig(
        coordinator=_address(address) if address else None,
        name=name or env.get("PS_NAME", ""),
        advertise=advertise or env.get("PS_ADVERTISE", ""),
        interface=interface or env.get("PS_INTERFACE", ""),
        launched_ranks=_count(env.get("WORLD_SIZE", "")) if "RANK" in env else 1,
        launched_here=_count(env.get("LOCAL_WORLD_SIZE", "")),
        launched_at=env.get("MASTER_ADDR", ""),
        join_timeout_s=_seconds("PS_JOIN_TIMEOUT_S", env.get("PS_JOIN_TIMEOUT_S", ""), 60.0),
    )


def follows() -> bool:
    """Whether torchrun, or the like, has started this process as another than the first: that one is the worker."""
    return os.environ.get("RANK", "0") != "0"


def _address(text: str) -> Address:
    try:
        return Address.parse(text)
    except ValueError as error:
        raise ConfigError(f"coordinator: {error}") from None


def _torchrun() -> dict[str, str]:
    keys = ("RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR")
    return {key: os.environ[key] for key in keys if key in os.environ}


def _count(text: str) -> int:
    """What another program has set, for itself; 1 where it makes no sense to us."""
    return max(1, int(text)) if text.isdecimal() else 1


def _seconds(key: str, text: str, default: float) -> float:
    try:
        return float(text) if text else default
    except ValueError:
        raise ConfigError(f"{key}={text!r} is not a number of seconds, e.g. 60") from None
