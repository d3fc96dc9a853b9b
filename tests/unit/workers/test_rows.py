"""Gradients that travel as rows: summed, cut by shard, laid out; other layouts refused by name."""

from __future__ import annotations

import re

import pytest
import torch
from torch import Tensor, nn

from ps.errors import UnsupportedError
from ps.optim.spec import hyper, served
from ps.sharding.layout import rows_bytes
from ps.sharding.partition import make_plan
from ps.sharding.spec import ModelSignature, ParamSpec, ShardingPlan
from ps.store.dense import split_rows
from workers.buffers import ModelMemory
from workers.routing import Message
from workers.rows import RowsOutgoing, as_rows

SPEC = ParamSpec(name="table", shape=(10, 3), dtype="float32", group=0, sparse=True)


def memory(optimizer: str = "SGD", *, sparse: bool = True, dtype: torch.dtype = torch.float32) -> ModelMemory:
    """Of one table of (10, 3); in shards of rows 0 to 5 and 6 to 9 if it is sparse and float32."""
    name = str(dtype).removeprefix("torch.")
    params = (ParamSpec(name="table", shape=(10, 3), dtype=name, group=0, sparse=sparse),)
    plan = make_plan(ModelSignature(params=params, optimizer=optimizer), 64)
    return ModelMemory(plan, [nn.Parameter(torch.zeros(10, 3, dtype=dtype))])


def staged(of: ModelMemory, grad: Tensor | None) -> tuple[ShardingPlan, RowsOutgoing, tuple[bool, ...]]:
    plan = of.layout.plan
    out = of.staged(Message.of(plan, [shard.id for shard in plan.shards]))
    assert isinstance(out, RowsOutgoing)
    present = of.stage_gradients([out], [grad])
    return plan, out, present


def coo(ids: list[int], values: Tensor) -> Tensor:
    return torch.sparse_coo_tensor(torch.tensor([ids]), values, (10, 3), check_invariants=False)


def sent(plan: ShardingPlan, out: RowsOutgoing) -> dict[int, Tensor]:
    """Row → values, as the servers read the payload."""
    found: dict[int, Tensor] = {}
    ends = (*out.source.offsets[1:], out.source.nbytes)
    for shard, begin, end in zip(out.message.shards, out.source.offsets, ends, strict=True):
        spec = plan.shards[shard]
        assert end - begin == rows_bytes(spec, out.rows[shard])
        ids, values = split_rows(spec, out.payload[begin:end], out.rows[shard])
        assert ids.tolist() == sorted(set(ids.tolist()))
        assert set(ids.tolist()) <= set(spec.rows)
        found |= dict(zip(ids.tolist(), values.view(-1, 3), strict=True))
    return found


def test_rows_are_summed_and_cut_by_shard() -> None:
    """Unsorted ids, one of them three times, over two shards: each row once, in its own shard."""
    values = torch.randn(5, 3)
    plan, out, present = staged(memory(), coo([7, 2, 7, 0, 7], values))
    assert present == (True,)
    assert out.rows == {0: 2, 1: 1}
    rows = sent(plan, out)
    assert sorted(rows) == [0, 2, 7]
    assert torch.equal(rows[2], values[1])
    assert torch.equal(rows[7], values[0] + values[2] + values[4])
    assert out.payload.untyped_storage().nbytes() == out.payload.numel() == out.source.nbytes


def test_no_rows_is_a_gradient_and_none_is_not() -> None:
    """A batch without ids sends nothing but counts; a parameter without gradient does not."""
    _, out, present = staged(memory(), coo([], torch.empty(0, 3)))
    assert (present, out.rows, out.payload.numel()) == ((True,), {0: 0, 1: 0}, 0)
    _, out, present = staged(memory(), None)
    assert (present, out.rows, out.payload.numel()) == ((False,), {0: 0, 1: 0}, 0)


def test_each_push_has_a_payload_of_its_own() -> None:
    """What is still being sent is never written again."""
    of = memory()
    plan = of.layout.plan
    out = of.staged(Message.of(plan, [shard.id for shard in plan.shards]))
    of.stage_gradients([out], [coo([1], torch.ones(1, 3))])
    first = out.payload
    before = first.clone()
    of.stage_gradients([out], [coo([1], torch.zeros(1, 3))])
    assert torch.equal(first, before)


def test_a_dense_gradient_of_a_table_is_all_its_rows() -> None:
    """As a weight gets that is tied to a Linear."""
    grad = torch.randn(3, 10).t()
    plan, out, _ = staged(memory(), grad)
    rows = sent(plan, out)
    assert torch.equal(torch.stack([rows[index] for index in range(10)]), grad)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_rows_are_rounded_once(dtype: torch.dtype) -> None:
    """Row values of 1 and many small ones, whose sum in 16 bits would stay 1."""
    values = torch.cat([torch.ones(1, 3), torch.full((64, 3), 2.0**-12)]).to(dtype)
    plan, out, _ = staged(memory(dtype=dtype), coo([4] * 65, values))
    assert sent(plan, out)[4].tolist() == [1 + 2.0**-6] * 3


def test_other_layouts_are_refused_by_name() -> None:
    """A sparse tensor over single elements is not what embeddings make."""
    with pytest.raises(UnsupportedError, match=r"'table' is neither dense nor made of rows .* nn.Embedding"):
        as_rows(torch.ones(10, 3).to_sparse(2), SPEC)


def test_gradients_that_the_class_or_the_plan_does_not_expect() -> None:
    """A sparse gradient nobody announced, and a dense one for SparseAdam: refused by name, nothing is staged."""
    plan = (of := memory(sparse=False)).layout.plan
    out = of.staged(Message.of(plan, [shard.id for shard in plan.shards]))
    with pytest.raises(UnsupportedError, match=r"the gradient of 'table' is sparse .*, but no nn.Embedding"):
        of.stage_gradients([out], [coo([1], torch.ones(1, 3))])
    with pytest.raises(
        UnsupportedError, match="the gradient of 'table' is dense, and SparseAdam does not support dense"
    ):
        staged(memory("SparseAdam"), torch.ones(10, 3))


def test_decay_that_comes_later_is_refused_by_name() -> None:
    """weight_decay set in mid-run is refused before a push, as it is at attach."""
    group = torch.optim.SGD([torch.zeros(1)], lr=0.1).param_groups[0]
    of = memory()
    of.check_rows([hyper(group, served("SGD"))])
    group["weight_decay"] = 0.1
    with pytest.raises(UnsupportedError, match=re.escape("SGD: weight_decay is not compatible with sparse gradients")):
        of.check_rows([hyper(group, served("SGD"))])


def test_conjugated_and_negated_gradients_are_staged_as_they_are() -> None:
    """Autograd may hand out lazily conjugated gradients, which torch's own Adam can't even take."""
    params = [nn.Parameter(torch.zeros(4, 3, dtype=torch.complex64)) for _ in range(2)]
    specs = tuple(ParamSpec(name=f"p{i}", shape=(4, 3), dtype="complex64", group=0) for i in range(2))
    of = ModelMemory(make_plan(ModelSignature(params=specs, optimizer="Adam"), 128), params)
    plan = of.layout.plan
    out = of.staged(Message.of(plan, [shard.id for shard in plan.shards]))
    value = torch.randn(3, 4, dtype=torch.complex64)
    grads = [value.t().conj(), torch.randn(4, 3, dtype=torch.complex64).conj()]
    assert all(grad.is_conj() for grad in grads)
    of.stage_gradients([out], grads)
    for cut, view in out.pieces:
        expected = grads[cut.param].resolve_conj().reshape(-1)[cut.begin : cut.end]
        assert torch.equal(view.reshape(-1), expected)
