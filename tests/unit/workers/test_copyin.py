"""Copy-in: what is worked out once per message stays right when parameters move, or only some shards are newer."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from ps.sharding.partition import make_plan
from ps.sharding.spec import ModelSignature, ParamSpec
from workers.buffers import ModelMemory
from workers.routing import Message


def memory_of(params: list[nn.Parameter], shard_bytes: int) -> tuple[ModelMemory, Message]:
    specs = [
        ParamSpec(name=f"p{index}", shape=tuple(param.shape), dtype=str(param.dtype).removeprefix("torch."), group=0)
        for index, param in enumerate(params)
    ]
    plan = make_plan(ModelSignature(params=tuple(specs), optimizer="SGD"), shard_bytes)
    return ModelMemory(plan, params), Message.of(plan, [shard.id for shard in plan.shards])


def send(memory: ModelMemory, message: Message, values: list[Tensor]) -> Tensor:
    """A reply that holds these values."""
    out = memory.outgoing(message)
    memory.stage_gradients([out], values)
    return out.payload


def fresh(params: list[nn.Parameter]) -> list[Tensor]:
    return [torch.randn(param.shape).to(param.dtype) for param in params]


def moved(param: nn.Parameter) -> Tensor:
    return param.data.clone()


def turned(param: nn.Parameter) -> Tensor:
    return param.data.t()


@pytest.mark.parametrize("shard_bytes", [128, 1 << 20])
@pytest.mark.parametrize("change", [moved, turned])
def test_parameters_that_were_given_other_memory_are_found_again(
    change: Callable[[nn.Parameter], Tensor], shard_bytes: int
) -> None:
    """`.data` was set: to a copy, or to the same memory read in another order. The next weights go there."""
    params = [nn.Parameter(torch.randn(8, 8)) for _ in range(3)]
    memory, message = memory_of(params, shard_bytes)
    for _ in range(2):
        memory.take(message, send(memory, message, fresh(params)), message.shards)
    params[1].data = change(params[1])
    values = fresh(params)
    memory.take(message, send(memory, message, values), message.shards)
    assert all(torch.equal(param, value) for param, value in zip(params, values, strict=True))


def test_writing_is_seen_by_autograd() -> None:
    """Every copy-in moves the parameters' version counters, also those by views that were kept."""
    params = [nn.Parameter(torch.randn(30)), nn.Parameter(torch.randn(8, 8))]
    memory, message = memory_of(params, 128)
    for _ in range(2):
        before = [param._version for param in params]
        memory.take(message, send(memory, message, fresh(params)), message.shards)
        assert all(param._version > version for param, version in zip(params, before, strict=True))


def test_all_shards_and_some_in_turn() -> None:
    """A parameter that is split and not row-major is put together right whichever of its shards came last."""
    params = [nn.Parameter(torch.randn(9, 20).t()), nn.Parameter(torch.randn(50))]
    memory, message = memory_of(params, 128)
    assert len(message.shards) > 3
    first, second = fresh(params), fresh(params)
    memory.take(message, send(memory, message, first), message.shards)
    memory.take(message, send(memory, message, second), message.shards[1:])
    plan = memory.layout.plan
    for piece in (piece for shard in plan.shards for piece in shard.pieces):
        source = (first if piece in plan.shards[0].pieces else second)[piece.param]
        got = params[piece.param].detach().reshape(-1)[piece.begin : piece.end]
        assert torch.equal(got, source.reshape(-1)[piece.begin : piece.end])
    memory.take(message, send(memory, message, first), message.shards)
    assert all(torch.equal(param, value) for param, value in zip(params, first, strict=True))


def test_neighbouring_pieces_of_a_parameter_are_one() -> None:
    """Shards of one message that hold parts of one parameter: it is copied whole, in one section per dtype."""
    params = [nn.Parameter(torch.randn(8, 8)), nn.Parameter(torch.randn(70)), nn.Parameter(torch.randn(64).half())]
    memory, message = memory_of(params, 128)
    assert len(message.shards) > 4
    sections = memory.layout.sections(message, message.shards)
    cuts = [cut for section in sections for cut in section.pieces]
    assert len(sections) == 2 and [(cut.param, cut.whole) for cut in cuts] == [(0, True), (1, True), (2, True)]
    values = fresh(params)
    memory.take(message, send(memory, message, values), message.shards)
    assert all(torch.equal(param, value) for param, value in zip(params, values, strict=True))
