"""Classes that see tensors in their shapes, and gradients of rows: equal to torch.optim on whole parameters."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from ps.optim.apply import ShardOptimizer
from ps.optim.spec import hyper, served
from ps.optim.tensors import TensorOptimizer, optimizer_for
from ps.sharding.partition import make_plan
from ps.sharding.spec import ModelSignature, ParamSpec, Shard


class Case(NamedTuple):
    """An optimizer with arguments, and the shapes that it takes."""

    name: str
    options: dict[str, object]
    shapes: tuple[tuple[int, ...], ...]


WHOLE = [
    Case("Adafactor", {"lr": 0.1, "weight_decay": 0.01}, ((5, 7), (), (9,), (2, 3, 4))),
    Case("Adafactor", {"lr": 0.1, "maximize": True, "eps": (1e-6, 1e-2), "d": 2.0}, ((5, 7), (3,))),
    Case("Muon", {"lr": 0.1}, ((5, 7), (8, 3), (1, 4))),
    Case("Muon", {"lr": 0.1, "nesterov": False, "adjust_lr_fn": "match_rms_adamw", "ns_steps": 2}, ((5, 7),)),
]

ROWS = [
    Case("SGD", {"lr": 0.1}, ((20, 3),)),
    Case("SGD", {"lr": 0.1, "momentum": 0.9, "nesterov": True}, ((20, 3),)),
    Case("SGD", {"lr": 0.1, "momentum": 0.9, "dampening": 0.5, "maximize": True}, ((20, 3),)),
    Case("Adagrad", {"lr": 0.1, "lr_decay": 0.01, "initial_accumulator_value": 0.5}, ((20, 3),)),
    Case("Adagrad", {"lr": 0.1, "maximize": True}, ((20, 2, 2),)),
    Case("SparseAdam", {"lr": 0.1, "betas": (0.8, 0.9)}, ((20, 3),)),
    Case("SparseAdam", {"lr": 0.1, "maximize": True}, ((20, 3),)),
]

IDS: list[list[int] | None] = [[0, 3, 19], [3, 4], [], [0, 1, 2, 10, 11, 12, 19], None, [], [19], [0, 3]]
"""Rows that have a gradient, step by step; None = no gradient at all."""


def shards_of(case: Case, *, sparse: bool, shard_bytes: int) -> tuple[Shard, ...]:
    params = tuple(
        ParamSpec(name=f"p{index}", shape=shape, dtype="float32", group=0, sparse=sparse)
        for index, shape in enumerate(case.shapes)
    )
    signature = ModelSignature(params=params, optimizer=case.name, whole_tensors=served(case.name).whole_tensors)
    return make_plan(signature, shard_bytes).shards


def flat(shard: Shard, tensors: list[Tensor]) -> Tensor:
    found = torch.zeros(shard.numel)
    for piece in shard.pieces:
        part = tensors[piece.param].reshape(-1)[piece.begin : piece.end]
        found[piece.offset : piece.offset + piece.numel] = part
    return found


def coo(grad: Tensor, ids: list[int], rows: range) -> Tensor:
    """The rows `ids` of `grad` that lie in `rows`, numbered from there."""
    mine = [row for row in ids if row in rows]
    indices = torch.tensor([[row - rows.start for row in mine]], dtype=torch.int64)
    shape = (len(rows), *grad.shape[1:])
    return torch.sparse_coo_tensor(indices, grad[mine], shape, check_invariants=False, is_coalesced=True)


def identity(case: Case) -> str:
    return "-".join([case.name, *list(case.options)[1:]])


@pytest.mark.parametrize("case", WHOLE, ids=identity)
def test_whole_tensors_are_bitwise_torch_optim(case: Case) -> None:
    """Several tensors to a shard, one without gradient in some steps: each is updated in its own shape."""
    generator = torch.Generator().manual_seed(3)
    local = [torch.randn(shape, generator=generator) for shape in case.shapes]
    oracle = getattr(torch.optim, case.name)(local, **case.options)
    shards = shards_of(case, sparse=False, shard_bytes=1 << 20)
    (shard,) = shards
    weights = flat(shard, local)
    mine = TensorOptimizer(shard, served(case.name), weights)
    for step in range(6):
        missing = 0 if step in (0, 3) and len(local) > 1 else -1
        grads = [torch.randn(shape, generator=generator) for shape in case.shapes]
        bits = sum(1 << index for index in range(len(local)) if index != missing)
        mine.apply(flat(shard, grads), bits.to_bytes(1), hyper(oracle.param_groups[0], served(case.name)))
        for index, param in enumerate(local):
            param.grad = None if index == missing else grads[index]
        oracle.step()
        assert torch.equal(weights, flat(shard, local))


@pytest.mark.parametrize("case", ROWS, ids=identity)
def test_rows_are_bitwise_torch_optim(case: Case) -> None:
    """A matrix split over shards between rows, steps with few, all in one shard, no rows and no gradient."""
    generator = torch.Generator().manual_seed(3)
    local = torch.randn(case.shapes[0], generator=generator)
    oracle = getattr(torch.optim, case.name)([local], **case.options)
    shards = shards_of(case, sparse=True, shard_bytes=64)
    weights = [flat(shard, [local]) for shard in shards]
    mine = [TensorOptimizer(shard, served(case.name), at) for shard, at in zip(shards, weights, strict=True)]
    assert len(shards) > 3
    for ids in IDS:
        grad = torch.randn(local.shape, generator=generator)
        values = hyper(oracle.param_groups[0], served(case.name))
        for shard, optimizer in zip(shards, mine, strict=True):
            optimizer.apply(coo(grad, ids or [], shard.rows), bytes([ids is not None]), values)
        local.grad = None if ids is None else coo(grad, ids, range(len(local)))
        with torch.sparse.check_sparse_tensor_invariants(False):  # type: ignore[no-untyped-call]
            oracle.step()
        for shard, at in zip(shards, weights, strict=True):
            assert torch.equal(at, flat(shard, [local]))


@pytest.mark.parametrize("change", [lambda g: g.update(lr=0.5), lambda g: g.update(betas=(0.5, 0.5))])
def test_hyper_parameters_follow_each_push(change: Callable[[dict[str, object]], None]) -> None:
    """What schedulers change is in force at the next step, and nothing else is lost."""
    case = Case("SparseAdam", {"lr": 0.1}, ((4, 3),))
    (shard,) = shards_of(case, sparse=True, shard_bytes=1 << 20)
    local = torch.ones(4, 3)
    oracle: torch.optim.Optimizer = torch.optim.SparseAdam([local], lr=0.1)
    weights = flat(shard, [local])
    mine = TensorOptimizer(shard, served(case.name), weights)
    for step in range(4):
        if step == 2:
            change(oracle.param_groups[0])
        local.grad = coo(torch.ones(4, 3), [1, 2], range(4))
        mine.apply(local.grad, b"\x01", hyper(oracle.param_groups[0], served(case.name)))
        oracle.step()
    assert torch.equal(weights, flat(shard, [local]))


def test_gradients_are_not_kept() -> None:
    """The payload behind dense or sparse gradients may be reused at once, also where state begins as a copy of it."""
    case = Case("SGD", {"lr": 0.1, "momentum": 0.9}, ((4, 3),))
    (shard,) = shards_of(case, sparse=True, shard_bytes=1 << 20)
    weights = torch.zeros(shard.numel)
    mine = TensorOptimizer(shard, served("SGD"), weights)
    values = hyper(torch.optim.SGD([torch.zeros(1)], lr=0.1, momentum=0.9).param_groups[0], served("SGD"))
    grad = coo(torch.ones(4, 3), [1, 2], range(4))
    mine.apply(grad, b"\x01", values)
    grad.values().fill_(float("nan"))
    mine.apply(coo(torch.ones(4, 3), [], range(4)), b"\x01", values)
    assert torch.isfinite(weights).all()


def test_shapes_are_looked_at_only_where_they_matter() -> None:
    """Element-wise classes run over flat shards, the others, and rows, tensor by tensor."""
    for name, sparse, kind in [
        ("AdamW", False, ShardOptimizer),
        ("SGD", False, ShardOptimizer),
        ("SGD", True, TensorOptimizer),
        ("Muon", False, TensorOptimizer),
    ]:
        shards = shards_of(Case(name, {}, ((4, 3),)), sparse=sparse, shard_bytes=0)
        for shard in shards:
            assert type(optimizer_for(shard, served(name), torch.zeros(shard.numel), exact=True)) is kind
