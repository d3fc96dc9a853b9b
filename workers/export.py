"""`psctl export`: the parameters as the servers have them now, in one safetensors file that `load_state_dict` takes."""

from __future__ import annotations

import logging
import os
import threading
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from ps.clock import Clock, Deadline, MonotonicClock
from ps.control.api import Control, ShardMap
from ps.errors import PsError, UnsupportedError
from ps.sharding.partition import make_plan
from ps.sharding.spec import ModelSignature
from ps.types import JobState, LeaveReason, Role
from workers.buffers import ModelMemory
from workers.client import ParameterClient
from workers.cluster import Cluster
from workers.config import WorkerConfig
from workers.exchange import Exchange
from workers.lifecycle import Lifecycle
from workers.routing import Routes
from workers.staging import torch_dtype

log = logging.getLogger(__name__)

MAP_S = 10.0
"""How long to wait for the first shard map of a job that has one."""


class _Observer(Lifecycle):
    """An observer works on after the end of the job, until the coordinator releases everybody."""

    def on_job(self, state: JobState, reason: str, release: bool) -> None:
        """See `SessionListener.on_job`."""
        if release:
            super().on_job(state, reason, release)


def export(config: WorkerConfig, output: Path) -> int:
    """Join as an observer, pull every shard and write `output`; returns the number of parameters.

    Each shard is of one version, different shards perhaps of different ones while training goes on. Tied parameters
    are written once, under their first name. `output` is replaced as a whole or not at all. Raises `PsError` when
    the job has no weights yet, `CoordinatorLost`, or the `TransportError` that stood in the way.
    """
    clock = MonotonicClock()
    backend = Cluster(config)
    control, lifecycle = backend.control, _Observer()
    try:
        joined = control.join(role=Role.OBSERVER, name=config.name, timeout_s=config.join_timeout_s)
        control.start_session(lifecycle)
        transport = backend.open_transport(joined)
        try:
            control.ready(transport.address)
            shard_map = _shard_map(control, clock)
            plan = make_plan(shard_map.signature, shard_map.shard_bytes)
            params = blank(shard_map.signature)
            exchange = Exchange(
                transport=transport, control=control, lifecycle=lifecycle, routes=Routes(plan, shard_map),
                incarnation=joined.incarnation, secret=joined.secret, config=config, clock=clock,
            )  # fmt: skip
            client = ParameterClient(
                plan, ModelMemory(plan, list(params.values())), exchange, message_bytes=config.message_bytes
            )
            client.pull(force=True, frozen_too=True)
        finally:
            transport.close()
        control.leave(LeaveReason.DONE)
    finally:
        control.close()
    write({name: param.detach() for name, param in params.items()}, output)
    log.info("%d parameters written to %s", len(params), output)
    return len(params)


def blank(signature: ModelSignature) -> dict[str, nn.Parameter]:
    """Parameters of the signature's names, shapes and dtypes, to pull into."""
    return {
        spec.name: nn.Parameter(torch.zeros(spec.shape, dtype=torch_dtype(spec.dtype)), requires_grad=False)
        for spec in signature.params
    }


def write(tensors: dict[str, Tensor], output: Path) -> None:
    """Write a safetensors file atomically: a reader sees the old file or the whole new one."""
    unsupported = [name for name, tensor in tensors.items() if tensor.dtype == torch.complex128]
    if unsupported:
        raise UnsupportedError(f"safetensors can't hold complex128, which {unsupported[0]} is")
    output.parent.mkdir(parents=True, exist_ok=True)
    part = output.with_name(f".{output.name}.{os.getpid()}.part")
    try:
        save_file(tensors, part, metadata={"format": "pt"})
        with part.open("rb") as file:
            os.fsync(file.fileno())
        part.replace(output)
    finally:
        part.unlink(missing_ok=True)


def _shard_map(control: Control, clock: Clock) -> ShardMap:
    """The newest map, once it names the worker whose initial weights count."""
    deadline = Deadline.after(clock, MAP_S)
    never = threading.Event()
    while True:
        shard_map = control.shard_map()
        if shard_map is not None and shard_map.initialised_by is not None:
            return shard_map
        if deadline.expired(clock):
            raise PsError("the job has no weights yet: no worker has attached a model")
        clock.wait(never, 0.02)
