"""Attaching a model: agree on it, bring initial weights to the servers or from them, convert the optimizer."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NoReturn

import torch
from torch import nn
from torch.optim import Optimizer

from ps.clock import Clock, Deadline
from ps.control.api import Control, Joined, Proposal, ShardMap, Verdict
from ps.errors import PsError, UnsupportedError
from ps.rpc.transport import Transport
from ps.sharding.partition import make_plan
from ps.sharding.spec import NO_GROUP, ModelSignature
from workers.buffers import ModelMemory
from workers.client import ParameterClient
from workers.config import WorkerConfig
from workers.exchange import Exchange
from workers.lifecycle import Lifecycle
from workers.microbatches import MicroBatches
from workers.nonfinite import Screen
from workers.optimizer import RemoteStep, Stepper, convert
from workers.routing import Routes
from workers.signature import Description, describe, hyper_groups, unwrap

log = logging.getLogger(__name__)


@dataclass(slots=True)
class Attachment:
    """A model on the servers, and the optimizer that trains it."""

    model: nn.Module
    optimizer: Optimizer
    description: Description
    client: ParameterClient
    memory: ModelMemory
    batches: MicroBatches
    transport: Transport

    def push(self, samples: int) -> None:
        """Push the gradients with the current hyper-parameters, and take the new weights."""
        self.client.push_pull(hyper_groups(self.optimizer, self.description.served), samples, self.batches.take())

    def pull(self) -> None:
        """Take the newest weights; all of them, newer or not, where some were edited here."""
        edited = self.memory.edited()
        if edited is not None:
            name = self.description.signature.params[edited].name
            log.warning("pull: local changes of %r are replaced by the servers' weights", name)
        self.client.pull(force=edited is not None)

    def load(self, state_dict: Mapping[str, object], *, strict: bool) -> None:
        """Take a state dict and write its weights to the servers. On an error the weights are the servers'."""
        specs = self.description.signature.params
        frozen = [param for param, spec in zip(self.description.params, specs, strict=True) if spec.group == NO_GROUP]
        before = [param.detach().clone() for param in frozen]
        try:
            unwrap(self.model).load_state_dict(state_dict, strict=strict)
        except Exception:
            self.client.pull(force=True, frozen_too=True)
            raise
        changed = not all(torch.equal(old, new) for old, new in zip(before, frozen, strict=True))
        self.client.load(frozen_too=changed)


def attach(
    model: nn.Module,
    optimizer: Optimizer,
    *,
    joined: Joined,
    control: Control,
    open_transport: Callable[[Joined], Transport],
    lifecycle: Lifecycle,
    config: WorkerConfig,
    clock: Clock,
    drain: Callable[[], NoReturn],
    stepper: Stepper,
    accumulate: int = 1,
    on_nonfinite: str = "raise",
) -> Attachment:
    """See `Worker.attach`. On an error the transport is closed again and the optimizer is as it was."""
    if isinstance(optimizer, RemoteStep):
        raise UnsupportedError("this optimizer is attached to a worker already; attach a newly built one")
    description = describe(model, optimizer)
    screen = Screen(on_nonfinite, joined.name, [spec.name for spec in description.signature.params])
    batches = MicroBatches(description.params, accumulate)
    transport = open_transport(joined)
    try:
        control.ready(transport.address)
        first = _agree(description.signature, control, lifecycle, config, clock, drain)
        shard_map = _map_of(first)
        plan = make_plan(description.signature, shard_map.shard_bytes)
        memory = ModelMemory(plan, description.params)
        exchange = Exchange(
            transport=transport,
            control=control,
            lifecycle=lifecycle,
            routes=Routes(plan, shard_map),
            incarnation=joined.incarnation,
            secret=joined.secret,
            config=config,
            clock=clock,
        )
        client = ParameterClient(plan, memory, exchange, message_bytes=config.message_bytes, screen=screen)
        if first.verdict is Verdict.INITIALISE:
            client.initialise()
            exchange.routes.update(control.finish_init())
        client.hello()
        client.pull(force=True, frozen_too=True)
    except BaseException:
        transport.close()
        raise
    convert(optimizer, stepper)
    log.info("attached: %d parameters in %d shards", len(description.params), len(plan.shards))
    return Attachment(model, optimizer, description, client, memory, batches, transport)


def _agree(
    signature: ModelSignature,
    control: Control,
    lifecycle: Lifecycle,
    config: WorkerConfig,
    clock: Clock,
    drain: Callable[[], NoReturn],
) -> Proposal:
    """Propose the model until the job knows what to do with it."""
    deadline = Deadline.after(clock, config.start_timeout_s)
    while True:
        lifecycle.check()
        if lifecycle.draining:
            drain()
        proposal = control.propose_model(signature)
        if proposal.verdict is not Verdict.WAIT:
            return proposal
        if deadline.expired(clock):
            raise PsError(
                f"the job was not ready for training within {config.start_timeout_s:.0f} s: {proposal.reason}. "
                "Look at `psctl status`"
            )


def _map_of(proposal: Proposal) -> ShardMap:
    if proposal.shard_map is None:
        raise PsError(f"the coordinator answered {proposal.verdict.value} without a shard map")
    return proposal.shard_map
