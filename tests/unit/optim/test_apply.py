"""A class run over flat shards equals the class run on whole parameters: per class, split, with gradients missing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from ps.errors import UnsupportedError
from ps.optim.apply import ShardOptimizer, check_values
from ps.optim.spec import SERVED, hyper, served
from ps.sharding.partition import make_plan
from ps.sharding.spec import ModelSignature, ParamSpec, Shard, ShardingPlan

SHAPES = ((37, 5), (), (130,), (3,), (64, 2))


class Case(NamedTuple):
    """An optimizer with arguments."""

    name: str
    options: dict[str, object]


CASES = [
    Case("SGD", {"lr": 0.1}),
    Case("SGD", {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01}),
    Case("SGD", {"lr": 0.1, "momentum": 0.9, "dampening": 0.5}),
    Case("SGD", {"lr": 0.1, "momentum": 0.9, "nesterov": True, "maximize": True}),
    Case("Adam", {"lr": 0.01, "weight_decay": 0.1}),
    Case("Adam", {"lr": 0.01, "amsgrad": True, "maximize": True}),
    Case("AdamW", {"lr": 0.01}),
    Case("AdamW", {"lr": 0.01, "amsgrad": True}),
    Case("Adagrad", {"lr": 0.1, "lr_decay": 0.01, "initial_accumulator_value": 0.5}),
    Case("Adagrad", {"lr": 0.1, "weight_decay": 0.01, "maximize": True}),
    Case("RMSprop", {"lr": 0.01}),
    Case("RMSprop", {"lr": 0.01, "momentum": 0.9, "centered": True, "weight_decay": 0.1}),
    Case("Adadelta", {"lr": 1.0, "weight_decay": 0.01}),
    Case("Adamax", {"lr": 0.01, "weight_decay": 0.01}),
    Case("NAdam", {"lr": 0.01, "weight_decay": 0.01}),
    Case("NAdam", {"lr": 0.01, "weight_decay": 0.01, "decoupled_weight_decay": True}),
    Case("RAdam", {"lr": 0.01, "weight_decay": 0.01}),
    Case("ASGD", {"lr": 0.1, "weight_decay": 0.01, "t0": 3}),
    Case("Rprop", {"lr": 0.01}),
]


class Served:
    """Parameters of `SHAPES` served in shards, beside the same parameters trained by torch.optim itself."""

    def __init__(self, case: Case, *, exact: bool, dtype: torch.dtype = torch.float32, shard_bytes: int = 512) -> None:
        generator = torch.Generator().manual_seed(7)
        self.local = [torch.randn(shape, generator=generator, dtype=dtype) for shape in SHAPES]
        params = tuple(
            ParamSpec(name=f"p{i}", shape=shape, dtype=str(dtype).removeprefix("torch."), group=0)
            for i, shape in enumerate(SHAPES)
        )
        self.plan: ShardingPlan = make_plan(ModelSignature(params=params, optimizer=case.name), shard_bytes)
        self.oracle = getattr(torch.optim, case.name)(self.local, **case.options, foreach=False)
        self.kind = served(case.name)
        self.weights = [flat(shard, self.local) for shard in self.plan.shards]
        self.shards = [
            ShardOptimizer(shard, self.kind, weights, exact=exact)
            for shard, weights in zip(self.plan.shards, self.weights, strict=True)
        ]
        self.generator = generator

    def step(self, missing: Sequence[int] = ()) -> None:
        """One step of both, on the same random gradients; parameters in `missing` have none."""
        grads: list[Tensor | None] = []
        for index, param in enumerate(self.local):
            grad = torch.randn(param.shape, generator=self.generator, dtype=param.dtype)
            grads.append(None if index in missing else grad)
            param.grad = grads[-1]
        values = hyper(self.oracle.param_groups[0], self.kind)
        filled = [torch.full_like(p, 7.0) if g is None else g for p, g in zip(self.local, grads, strict=True)]
        for shard, optimizer in zip(self.plan.shards, self.shards, strict=True):
            optimizer.apply(flat(shard, filled), bitmap(shard, missing), values)
        self.oracle.step()

    def served(self) -> list[Tensor]:
        """The served weights as parameters."""
        found = [torch.zeros_like(param) for param in self.local]
        for shard, weights in zip(self.plan.shards, self.weights, strict=True):
            for piece in shard.pieces:
                part = weights[piece.offset : piece.offset + piece.numel]
                found[piece.param].view(-1)[piece.begin : piece.end] = part
        return found


def flat(shard: Shard, params: Sequence[Tensor]) -> Tensor:
    """The shard's flat tensor, filled from whole parameters."""
    found = torch.zeros(shard.numel, dtype=params[0].dtype)
    for piece in shard.pieces:
        part = params[piece.param].reshape(-1)[piece.begin : piece.end]
        found[piece.offset : piece.offset + piece.numel] = part
    return found


def bitmap(shard: Shard, missing: Sequence[int] = ()) -> bytes:
    """Presence bits of the shard's pieces."""
    bits = sum(1 << index for index, piece in enumerate(shard.pieces) if piece.param not in missing)
    return bits.to_bytes((len(shard.pieces) + 7) // 8, "little")


def check_equal(pair: Served, *, ulps: int = 0) -> None:
    for mine, theirs in zip(pair.served(), pair.local, strict=True):
        if ulps:
            eps = torch.finfo(theirs.dtype).eps
            torch.testing.assert_close(mine, theirs, rtol=ulps * eps, atol=ulps * eps)
        else:
            assert torch.equal(mine, theirs)


MISSING = [(), (), (0,), (0, 2), (), (1, 2, 3, 4), (0, 1, 2, 3, 4), (), (4,), ()]


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.name}-{'-'.join(list(case.options)[1:])}")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["f32", "f64"])
def test_exact_is_bitwise_torch_optim(case: Case, dtype: torch.dtype) -> None:
    """Split over shards, with gradients missing in turn, every bit is that of torch.optim on whole tensors."""
    pair = Served(case, exact=True, dtype=dtype)
    for missing in MISSING:
        pair.step(missing)
        check_equal(pair)


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.name}-{'-'.join(list(case.options)[1:])}")
def test_default_kernels_are_within_a_few_ulps(case: Case) -> None:
    """Fused and foreach kernels differ from the for-loop only by rounding."""
    pair = Served(case, exact=False)
    for missing in MISSING:
        pair.step(missing)
    check_equal(pair, ulps=32)


@pytest.mark.parametrize("case", [CASES[1], CASES[4], CASES[10]], ids=lambda case: case.name)
def test_complex_parameters(case: Case) -> None:
    """complex64 runs, where no fused kernel exists, and equals torch.optim."""
    for exact in (True, False):
        pair = Served(case, exact=exact, dtype=torch.complex64)
        for _ in range(3):
            pair.step()
        check_equal(pair, ulps=32)


def test_hyper_parameters_change_in_mid_run() -> None:
    """Learning rate, betas and weight decay follow each push, as schedulers set them."""
    pair = Served(Case("AdamW", {"lr": 0.01}), exact=True)
    group = pair.oracle.param_groups[0]
    for lr, beta, decay in [(0.01, 0.9, 0.0), (0.02, 0.8, 0.1), (0.005, 0.95, 0.0)]:
        group["lr"], group["betas"], group["weight_decay"] = lr, (beta, 0.99), decay
        pair.step()
    check_equal(pair)


def test_momentum_switched_on_in_mid_run() -> None:
    """State that appears after many steps becomes part of the shard and survives a regrouping."""
    pair = Served(Case("SGD", {"lr": 0.1}), exact=True)
    pair.step()
    pair.oracle.param_groups[0]["momentum"] = 0.9
    for missing in [(), (0,), (), (3,), ()]:
        pair.step(missing)
    check_equal(pair)


def one_shard(name: str, *pieces: int, exact: bool = True) -> tuple[Tensor, ShardOptimizer, Shard]:
    params = tuple(ParamSpec(name=f"p{i}", shape=(n,), dtype="float32", group=0) for i, n in enumerate(pieces))
    (shard,) = make_plan(ModelSignature(params=params, optimizer=name), 1 << 20).shards
    weights = torch.zeros(shard.numel)
    return weights, ShardOptimizer(shard, served(name), weights, exact=exact), shard


def test_adam_gives_800_not_858() -> None:
    """A piece without gradient in the first two steps starts its own count: one shared counter would give 0.858."""
    weights, optimizer, shard = one_shard("Adam", 1, 1)
    weights[16] = 1.0
    values = hyper(torch.optim.Adam([torch.zeros(1)], lr=0.1).param_groups[0], served("Adam"))
    for missing in [(1,), (1,), (), ()]:
        grads = torch.zeros(shard.numel)
        grads[0] = grads[16] = 1.0
        optimizer.apply(grads, bitmap(shard, missing), values)
    assert weights[16].item() == pytest.approx(0.8, abs=1e-4)


def test_runs_are_maximal_and_stay() -> None:
    """All pieces in the same state are one run; after one is left out they split; the same bitmap keeps the runs."""
    _, optimizer, shard = one_shard("Adam", 5, 5, 5)
    values = hyper(torch.optim.Adam([torch.zeros(1)]).param_groups[0], served("Adam"))
    grads = torch.ones(shard.numel)
    optimizer.apply(grads, bitmap(shard), values)
    assert list(optimizer.runs) == [(0, 3)]
    optimizer.apply(grads, bitmap(shard, (1,)), values)
    optimizer.apply(grads, bitmap(shard), values)
    assert list(optimizer.runs) == [(0, 1), (1, 2), (2, 3)]
    assert dict(optimizer.state_of(0))["step"] == 3.0
    assert dict(optimizer.state_of(1))["step"] == 2.0


def test_padding_never_reaches_a_piece() -> None:
    """Even where zeros divided by zeros make NaN in the padding (eps=0), pieces hold what they should."""
    for exact in (True, False):
        weights, optimizer, shard = one_shard("Adam", 3, 5, exact=exact)
        values = hyper(torch.optim.Adam([torch.zeros(1)], lr=0.1, eps=0.0).param_groups[0], served("Adam"))
        for _ in range(2):
            optimizer.apply(flat(shard, [torch.ones(3), torch.ones(5)]), bitmap(shard), values)
        assert torch.isfinite(weights[0:3]).all()
        assert torch.isfinite(weights[16:21]).all()


def test_gradients_are_not_kept() -> None:
    """After a push nothing of its payload is referenced or shared: the buffer may be reused at once."""
    for case in CASES:
        pair = Served(case, exact=True)
        grads = flat(pair.plan.shards[0], pair.local)
        values = hyper(pair.oracle.param_groups[0], pair.kind)
        pair.shards[0].apply(grads, bitmap(pair.plan.shards[0]), values)
        before = pair.weights[0].clone()
        grads.fill_(float("nan"))
        pair.shards[0].apply(torch.zeros_like(grads), bitmap(pair.plan.shards[0]), values)
        for piece in pair.plan.shards[0].pieces:
            assert torch.isfinite(pair.weights[0][piece.offset : piece.offset + piece.numel]).all()
        assert before.shape == pair.weights[0].shape


@pytest.mark.parametrize("name", SERVED)
def test_schedules_may_come_to_a_learning_rate_of_zero(name: str) -> None:
    """Also where the constructor refuses it, as SparseAdam's does: plain torch asks it only once."""
    values = dict(hyper(getattr(torch.optim, name)([torch.zeros(2, 2)], lr=0.1).param_groups[0], served(name)))
    check_values(served(name), tuple({**values, "lr": 0.0}.items()))


def test_bad_values_are_refused() -> None:
    """The class's own checks are run before a push is accepted: a negative learning rate is refused by name."""
    good = hyper(torch.optim.SGD([torch.zeros(1)]).param_groups[0], served("SGD"))
    check_values(served("SGD"), good)
    with pytest.raises(UnsupportedError, match="SGD refuses its hyper-parameters: Invalid learning rate"):
        check_values(served("SGD"), (("lr", -1.0), *good[1:]))
