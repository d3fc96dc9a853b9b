"""Attaching a model: agree on it, bring initial weights to the servers or from them, convert the optimizer."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ps.clock import Clock, Deadline
from ps.control.api import Control, Joined, Proposal, ShardMap, Verdict
from ps.errors import ConfigError, ModelMismatch, PsError, UnsupportedError
from ps.optim.spec import ServedOptimizer
from ps.optim.state import pack, unpack
from ps.rpc.transport import Transport
from ps.sharding.partition import make_plan
from ps.sharding.spec import LOCAL, NO_GROUP, ModelSignature, ShardingPlan
from ps.types import ShardId
from workers.buffers import ModelMemory
from workers.client import ParameterClient
from workers.config import WorkerConfig
from workers.exchange import Exchange
from workers.lifecycle import Lifecycle
from workers.microbatches import MicroBatches
from workers.model_buffers import ModelBuffers, Policies, describe_buffers
from workers.nonfinite import Screen
from workers.optimizer import RemoteStep, Stepper, convert
from workers.routing import Routes
from workers.signature import Description, describe, hyper_groups, unwrap
from workers.state import Gathered, ParamState, check, split

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

    def close(self) -> None:
        """End the line to the servers. Idempotent; bounded."""
        self.transport.close()

    def push(self, samples: int) -> None:
        """Push the gradients with the current hyper-parameters, and take the new weights."""
        self.client.push_pull(hyper_groups(self.optimizer, self.description.served), samples, self.batches.take())

    def push_buffers(self) -> None:
        """Push buffers that have changed here since they were sent."""
        self.client.push_buffers(hyper_groups(self.optimizer, self.description.served))

    def pull(self) -> None:
        """Take the newest weights and buffers; all of them, newer or not, where weights were edited here."""
        self.push_buffers()
        edited = self.memory.edited()
        if edited is not None:
            name = self.description.signature.params[edited].name
            log.warning("pull: local changes of %r are replaced by the servers' weights", name)
        self.client.pull(force=edited is not None)

    def load(self, state_dict: Mapping[str, object], *, strict: bool) -> None:
        """Take a state dict and write its weights to the servers. On an error the weights are the servers'."""
        specs = self.description.signature.params
        once = [index for index, spec in enumerate(specs) if spec.group == NO_GROUP and spec.buffer in ("", LOCAL)]
        self.memory.find_buffers()
        before = [self.memory.params[index].detach().clone() for index in once]
        try:
            unwrap(self.model).load_state_dict(state_dict, strict=strict)
        except Exception:
            self.client.pull(force=True, frozen_too=True)
            raise
        self.memory.find_buffers()
        changed = not all(torch.equal(old, self.memory.params[index]) for old, index in zip(before, once, strict=True))
        self.client.load(frozen_too=changed)

    def optimizer_state(self) -> dict[Tensor, dict[str, object]]:
        """The optimizer's state of each parameter that has any, from the servers."""
        plan, served = self.memory.layout.plan, self.description.served
        gathered = Gathered(plan, served)
        self.client.read_state(
            lambda shard, payload: gathered.add(plan.shards[shard], unpack(payload, plan.shards[shard], served))
        )
        states = {param: gathered.state_of(index, param) for index, param in enumerate(self.description.params)}
        params = (param for group in self.optimizer.param_groups for param in group["params"])
        return {param: states[param] for param in params if states[param]}

    def load_optimizer(self, state_dict: Mapping[str, Any]) -> None:
        """Write the state of a `state_dict` to the servers, and take its hyper-parameters."""
        groups, saved = self.optimizer.param_groups, state_dict["param_groups"]
        if [len(group["params"]) for group in groups] != [len(group["params"]) for group in saved]:
            raise ModelMismatch(
                "optimizer_state has param groups of other sizes than the attached optimizer: "
                f"{[len(group['params']) for group in saved]} against {[len(group['params']) for group in groups]}"
            )
        numbers = {id(param): index for index, param in enumerate(self.description.params)}
        params = [numbers[id(param)] for group in groups for param in group["params"]]
        ids = [number for group in saved for number in group["params"]]
        specs, states = self.description.signature.params, state_dict["state"]
        known = {index: states[number] for index, number in zip(params, ids, strict=True) if states.get(number)}
        for index, state in known.items():
            check(specs[index], state, self.description.served)
        self.client.write_state(_packer(self.memory.layout.plan, known, self.description.served))
        self.optimizer.load_state_dict({**state_dict, "state": {}})


def _packer(
    plan: ShardingPlan, states: Mapping[int, ParamState], optimizer: ServedOptimizer
) -> Callable[[ShardId], Tensor]:
    """Packs the state of one shard, out of that of the parameters."""
    return lambda shard: pack(split(plan.shards[shard], plan.signature.params, states, optimizer))


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
    buffers: Policies | None = None,
    buffers_every: int = 1,
) -> Attachment:
    """See `Worker.attach`. On an error the transport is closed again and the optimizer is as it was."""
    check_unattached(optimizer)
    if isinstance(buffers_every, bool) or not isinstance(buffers_every, int) or buffers_every < 1:
        raise ConfigError(f"attach(buffers_every={buffers_every!r}) must be a whole number of pushes, at least 1")
    found = describe_buffers(model, buffers)
    description = describe(model, optimizer, [buffer.spec for buffer in found])
    screen = Screen(on_nonfinite, joined.name, [spec.name for spec in description.signature.params])
    batches = MicroBatches(description.trained, accumulate)
    transport = open_transport(joined)
    try:
        control.ready(transport.address)
        first = _agree(description.signature, control, lifecycle, config, clock, drain)
        shard_map = _map_of(first)
        plan = make_plan(description.signature, shard_map.shard_bytes)
        memory = ModelMemory(plan, description.params, buffers=ModelBuffers(found))
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
        client = ParameterClient(
            plan, memory, exchange,
            message_bytes=config.message_bytes, screen=screen, buffers_every=buffers_every,
        )  # fmt: skip
        if first.verdict is Verdict.INITIALISE:
            client.initialise()
            if description.state:
                client.write_state(_packer(plan, description.state, description.served))
            exchange.routes.update(control.finish_init())
        elif description.state:
            log.warning("the state of this optimizer is not used: that of the job counts, as do the job's weights")
        client.hello()
        client.pull(force=True, frozen_too=True)
    except BaseException:
        transport.close()
        raise
    convert(optimizer, stepper)
    log.info("attached: %d parameters in %d shards", len(description.params), len(plan.shards))
    for policy in dict.fromkeys(buffer.spec.buffer for buffer in found):
        names = [buffer.spec.name for buffer in found if buffer.spec.buffer == policy]
        log.info("buffers, %s: %s", policy, ", ".join(names))
    return Attachment(model, optimizer, description, client, memory, batches, transport)


def check_unattached(optimizer: Optimizer) -> None:
    """Raise `UnsupportedError` for an optimizer that a worker has already."""
    if isinstance(optimizer, RemoteStep):
        raise UnsupportedError("this optimizer is attached to a worker already; attach a newly built one")


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
