"""Staging and copy-in with parameters on several devices. A second "device" lies in host memory here."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, nn

from ps.sharding.partition import make_plan
from ps.sharding.spec import ModelSignature, ParamSpec
from ps.types import ShardId
from tests.support.lanes import FlatLane
from workers.buffers import ModelMemory
from workers.lanes import HostLane, Lane, copy, lane_for
from workers.routing import Message
from workers.staging import Outgoing


class TwoDevices(ModelMemory):
    """A memory whose parameters alternate between devices as `pattern` says."""

    def __init__(self, params: Sequence[nn.Parameter], pattern: Sequence[int], shard_bytes: int) -> None:
        specs = tuple(
            ParamSpec(name=f"p{index}", shape=tuple(param.shape), dtype="float32", group=0)
            for index, param in enumerate(params)
        )
        self.devices: list[HostLane] = [HostLane(), FlatLane(), FlatLane()]
        self.plan = make_plan(ModelSignature(params=specs, optimizer="SGD"), shard_bytes)
        super().__init__(self.plan, params, lanes=lambda param: self.devices[pattern[param]])

    def message(self) -> Message:
        return Message.of(self.plan, [shard.id for shard in self.plan.shards])


def model() -> list[nn.Parameter]:
    shapes = ((3, 5), (40,), (), (7, 11), (2,), (0,), (64,))
    return [nn.Parameter(torch.randn(shape)) for shape in shapes] + [nn.Parameter(torch.randn(9, 6).t())]


PATTERNS = ([0] * 8, [1] * 8, [0, 0, 0, 1, 1, 1, 2, 2], [0, 1, 2, 0, 1, 2, 0, 1], [1, 2, 1, 1, 2, 1, 2, 1])


@pytest.mark.parametrize("shard_bytes", [128, 1 << 20])
@pytest.mark.parametrize("pattern", PATTERNS)
def test_any_mix_of_devices_stages_the_same_bytes(pattern: list[int], shard_bytes: int) -> None:
    """Weights and gradients, some absent, reach the message as they do from host memory alone."""
    params = model()
    grads: list[Tensor | None] = [torch.randn_like(param) if index != 4 else None for index, param in enumerate(params)]
    payloads = []
    for devices in ([0] * 8, pattern):
        memory = TwoDevices(params, devices, shard_bytes)
        out = memory.outgoing(memory.message())
        memory.stage_weights(out)
        weights = out.payload.clone()
        gradient = memory.outgoing(memory.message())
        present = memory.stage_gradients([gradient], grads)
        assert present == tuple(grad is not None for grad in grads)
        payloads.append((weights, gradient.payload))
    assert torch.equal(payloads[0][0], payloads[1][0]) and torch.equal(payloads[0][1], payloads[1][1])


@pytest.mark.parametrize("shard_bytes", [128, 1 << 20])
@pytest.mark.parametrize("pattern", PATTERNS)
def test_any_mix_of_devices_takes_the_same_weights(pattern: list[int], shard_bytes: int) -> None:
    """A reply is brought over once per device that needs it, and every parameter ends as it was sent."""
    source = model()
    sender = TwoDevices(source, [0] * 8, shard_bytes)
    out = sender.outgoing(sender.message())
    sender.stage_weights(out)
    params = model()
    memory = TwoDevices(params, pattern, shard_bytes)
    memory.take(memory.message(), out.payload, [shard.id for shard in memory.plan.shards])
    assert all(torch.equal(a, b) for a, b in zip(params, source, strict=True))
    flat = [lane for lane in memory.devices if isinstance(lane, FlatLane)]
    assert [lane.brought for lane in flat] == [int(number in pattern) for number in (1, 2)]
    if shard_bytes > 128:  # whole tensors: each is copied once, by its own device's lane
        pieces = [pattern[piece.param] for shard in memory.plan.shards for piece in shard.pieces]
        assert [lane.scattered for lane in flat] == [pieces.count(number) for number in (1, 2)]


def test_shards_that_are_not_wanted_are_left_alone() -> None:
    """Only answers that are newer are copied in."""
    params = model()
    memory = TwoDevices(params, [0, 1] * 4, 128)
    before = [param.detach().clone() for param in params]
    message = memory.message()
    memory.take(message, torch.zeros(message.nbytes, dtype=torch.uint8), [ShardId(0)])
    changed = {index for index, (a, b) in enumerate(zip(params, before, strict=True)) if not torch.equal(a, b)}
    assert changed and changed <= {piece.param for piece in memory.plan.shards[0].pieces}


def test_one_device_moves_each_message_as_one() -> None:
    """Side by side on the device, one copy to the host."""
    memory = TwoDevices(model(), [1] * 8, 1 << 20)
    out: Outgoing = memory.outgoing(memory.message())
    memory.stage_weights(out)
    lane = memory.devices[1]
    assert isinstance(lane, FlatLane) and lane.moved == [out.payload.numel()]


def test_devices_without_a_lane_of_their_own_are_copied_plainly() -> None:
    """The CPU's lane waits for nothing."""
    lane: Lane = lane_for(torch.device("cpu"))
    assert type(lane) is HostLane and not lane.pinned and lane.flat is None
    copy([])
