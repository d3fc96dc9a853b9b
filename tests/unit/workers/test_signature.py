"""What can be attached, what is refused, and by which words."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DataParallel
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer, SparseAdam

from ps.errors import ModelError, UnsupportedError
from ps.sharding.spec import NO_GROUP
from workers.signature import describe, named_params, unwrap


class DoubleStep(SGD):
    """Changes what a step means."""

    def step(self, closure: object = None) -> None:  # type: ignore[override]
        super().step()
        super().step()


class MyAdamW(AdamW):
    """Changes defaults only."""


class FromScratch(Optimizer):
    """No class of torch.optim."""

    def __init__(self, params: object) -> None:
        super().__init__(params, {"lr": 0.1})  # type: ignore[arg-type]

    def step(self, closure: object = None) -> None:  # type: ignore[override]
        """Nothing."""


class Lambs(nn.Module):
    """Two parameters over one memory."""

    def __init__(self) -> None:
        super().__init__()
        memory = torch.zeros(10)
        self.a = nn.Parameter(memory[:6])
        self.b = nn.Parameter(memory[4:])


def sgd(model: nn.Module) -> Optimizer:
    return SGD(model.parameters(), lr=0.1)


def with_state(model: nn.Module, **extra: object) -> Optimizer:
    """After a step, with more in its state of each parameter."""
    optimizer = Adam(model.parameters())
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    optimizer.step()
    for state in optimizer.state.values():
        state.update(extra)
    return optimizer


def replaced_step(model: nn.Module) -> Optimizer:
    optimizer = sgd(model)
    optimizer.step = lambda closure=None: None  # type: ignore[method-assign,assignment]
    return optimizer


def foreign(model: nn.Module) -> Optimizer:
    params: list[torch.Tensor] = [*model.parameters(), nn.Parameter(torch.zeros(7))]
    return SGD(params, lr=0.1)


def table() -> nn.Module:
    return nn.Sequential(nn.Embedding(3, 2, sparse=True))


def integers() -> nn.Module:
    frozen = nn.Parameter(torch.zeros(2, dtype=torch.int8), requires_grad=False)
    return nn.ParameterList([nn.Parameter(torch.zeros(2)), frozen])


def eight_bits() -> nn.Module:
    return nn.ParameterList([nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(2).to(torch.float8_e4m3fn))])


def expanded() -> nn.Module:
    return nn.ParameterList([nn.Parameter(torch.zeros(1).expand(3))])


REFUSED: dict[str, tuple[Callable[[], nn.Module], Callable[[nn.Module], Optimizer], type[Exception], str]] = {
    "own step": (lambda: nn.Linear(2, 2), lambda m: DoubleStep(m.parameters(), lr=0.1), UnsupportedError,
                 "DoubleStep overrides the step of SGD"),
    "own optimizer": (lambda: nn.Linear(2, 2), lambda m: FromScratch(m.parameters()), UnsupportedError,
                      "FromScratch can't be run on the servers"),
    "LBFGS": (lambda: nn.Linear(2, 2), lambda m: torch.optim.LBFGS(m.parameters()), UnsupportedError, "LBFGS"),
    "replaced step": (lambda: nn.Linear(2, 2), replaced_step, UnsupportedError, "was replaced on the object"),
    "foreign state": (lambda: nn.Linear(2, 2), lambda m: with_state(m, trust=1.0), UnsupportedError,
                      "the optimizer's state of 'weight' holds 'trust', which torch.optim.Adam doesn't have"),
    "half a state": (lambda: nn.Linear(2, 2), lambda m: with_state(m, exp_avg_sq=None), ModelError,
                     "the optimizer's state of 'weight' lacks 'exp_avg_sq'"),
    "state of another shape": (lambda: nn.Linear(2, 2), lambda m: with_state(m, exp_avg=torch.zeros(3)), ModelError,
                               "has 'exp_avg' of shape [3], expected [2, 2]; is it of another model?"),
    "lazy": (lambda: nn.Sequential(nn.LazyLinear(2)), sgd, ModelError, "'0.weight' has no shape yet"),
    "meta": (lambda: nn.Linear(2, 2, device="meta"), sgd, ModelError, "'weight' is on the meta device"),
    "max_norm": (lambda: nn.Sequential(nn.Embedding(3, 2, max_norm=1.0)), sgd, UnsupportedError,
                 "Embedding '0' has max_norm=1.0"),
    "sparse gradients": (table, lambda m: AdamW(m.parameters()), UnsupportedError,
                         "AdamW does not support sparse gradients, and the embedding of '0.weight' has sparse=True"),
    "sparse gradients, whole tensors": (table, lambda m: torch.optim.Muon(m.parameters()), UnsupportedError,
                                        "Muon does not support sparse gradients"),
    "dense gradients": (lambda: nn.Sequential(nn.Embedding(3, 2, sparse=True), nn.Linear(2, 2)),
                        lambda m: SparseAdam(m.parameters()), UnsupportedError,
                        "SparseAdam does not support dense gradients, and '1.weight' belongs to no nn.Embedding"),
    "sparse decay": (table, lambda m: SGD(m.parameters(), lr=0.1, weight_decay=0.1), UnsupportedError,
                     "SGD: weight_decay is not compatible with sparse gradients, and the embedding of '0.weight'"),
    "sparse decay, Adagrad": (table, lambda m: Adagrad(m.parameters(), weight_decay=0.1), UnsupportedError,
                              "Adagrad: weight_decay is not compatible with sparse gradients"),
    "foreign": (lambda: nn.Linear(2, 2), foreign,
                ModelError, "parameter 2 of the optimizer's group 0, shape (7,), is not in the model"),
    "complex Adafactor": (lambda: nn.Linear(2, 2, dtype=torch.complex64),
                          lambda m: torch.optim.Adafactor(m.parameters()), UnsupportedError,
                          "Adafactor does not support complex parameters, and 'weight' is complex64"),
    "complex Muon": (lambda: nn.Linear(2, 2, bias=False, dtype=torch.complex128),
                     lambda m: torch.optim.Muon(m.parameters()), UnsupportedError,
                     "Muon does not support complex parameters, and 'weight' is complex128"),
    "integers": (integers, sgd, UnsupportedError, "'1' is int8; served are float64, float32, float16, bfloat16"),
    "8 bits": (eight_bits, sgd, UnsupportedError, "'1' is float8_e4m3fn; served are"),
    "shared memory": (Lambs, sgd, UnsupportedError, "'a' and 'b' share memory"),
    "expanded": (expanded, sgd, UnsupportedError, "'0' is an expanded tensor"),
    "no parameters": (nn.ReLU, lambda m: sgd(nn.Linear(1, 1)), ModelError, "ReLU has no parameters"),
    "capturable": (lambda: nn.Linear(2, 2), lambda m: Adam(m.parameters(), capturable=True), UnsupportedError,
                   "capturable=True"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_refused_by_name(case: str) -> None:
    """What can't be served is refused with an error that names the thing."""
    build, make, error, words = REFUSED[case]
    model = build()
    with pytest.raises(error, match=re.escape(words)):
        describe(model, make(model))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64, torch.complex64, torch.complex128])
def test_dtypes_that_are_served(dtype: torch.dtype) -> None:
    """Half precision, double precision and complex numbers are taken as they are."""
    found = describe(model := nn.Linear(2, 2, dtype=dtype), Adam(model.parameters()))
    assert {f"torch.{spec.dtype}" for spec in found.signature.params} == {str(dtype)}


def test_sparse_is_what_embeddings_say_and_optimizers_take() -> None:
    """Only trained weights of embeddings with sparse=True, also where they are tied to a dense layer."""
    model = nn.ModuleList(
        [nn.Embedding(3, 2, sparse=True), nn.EmbeddingBag(4, 2, sparse=True), nn.Embedding(5, 2), nn.Linear(2, 3)]
    )
    table, frozen, _, head = model
    assert isinstance(head, nn.Linear) and isinstance(table, nn.Embedding) and isinstance(frozen, nn.EmbeddingBag)
    head.weight = table.weight
    groups = [param for param in model.parameters() if param is not frozen.weight]
    sparse = [spec.name for spec in describe(model, SGD(groups, lr=0.1)).signature.params if spec.sparse]
    assert sparse == ["0.weight"]
    frozen.weight.requires_grad_(False)
    table.weight.requires_grad_(False)
    assert not any(spec.sparse for spec in describe(model, AdamW(model.parameters())).signature.params)


def test_the_optimizer_must_be_one() -> None:
    """Arguments in the wrong order are a TypeError, not something deep inside."""
    with pytest.raises(TypeError, match="got Linear"):
        describe(nn.Linear(1, 1), nn.Linear(1, 1))  # type: ignore[arg-type]


def test_tied_parameters_count_once_and_frozen_ones_have_no_group() -> None:
    """Tied weights are one parameter; those in no param group are marked as such; order is the model's."""
    model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2), nn.Linear(2, 2, bias=False))
    first, last = model[0], model[2]
    assert isinstance(first, nn.Linear) and isinstance(last, nn.Linear)
    last.weight = first.weight
    groups: list[dict[str, Any]] = [{"params": [model[1].weight], "lr": 0.5}, {"params": [first.weight]}]
    found = describe(model, SGD(groups, lr=0.1))
    assert [(spec.name, spec.group) for spec in found.signature.params] == [
        ("0.weight", 1), ("1.weight", 0), ("1.bias", NO_GROUP),
    ]  # fmt: skip
    assert found.signature.optimizer == "SGD"


def test_names_are_those_of_the_plain_model() -> None:
    """Compiled and DataParallel workers agree with plain ones on names."""
    plain = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 1)))
    names = [name for name, _ in named_params(plain)]
    compiled = torch.compile(plain, backend="eager")
    assert isinstance(compiled, nn.Module)
    assert [name for name, _ in named_params(DataParallel(compiled))] == names
    assert unwrap(DataParallel(compiled)) is plain
    branch = torch.compile(plain[1], backend="eager")
    assert isinstance(branch, nn.Module)
    inner = nn.Sequential(plain[0], branch)
    assert [name for name, _ in named_params(inner)] == names


def test_a_module_of_the_user_named_module_keeps_its_name() -> None:
    """Only real wrappers are stripped: an export must fit the user's own state_dict."""
    model = nn.ModuleDict({"module": nn.Linear(1, 1)})
    assert next(named_params(model))[0] == "module.weight"


def test_subclasses_without_own_step_and_fresh_adagrad_are_served() -> None:
    """A subclass that only changes defaults runs as its base; Adagrad has state from birth, which says nothing."""
    model = nn.Linear(2, 2)
    assert describe(model, MyAdamW(model.parameters())).signature.optimizer == "AdamW"
    assert describe(model, Adagrad(model.parameters())).signature.optimizer == "Adagrad"


def test_state_of_an_optimizer_that_has_made_steps_is_kept_by_parameter() -> None:
    """It goes to the servers if this worker's weights do; a fresh Adagrad's has nothing to say."""
    model = nn.Linear(2, 2)
    state = describe(model, with_state(model)).state
    assert [float(kept["step"]) for kept in state.values()] == [1.0, 1.0]  # type: ignore[arg-type]
    assert not describe(model, Adagrad(model.parameters())).state


def test_schedulers_made_before_do_not_count_as_a_replaced_step() -> None:
    """An LR scheduler wraps `step` on the object; that is known and allowed."""
    model = nn.Linear(2, 2)
    optimizer = sgd(model)
    torch.optim.lr_scheduler.StepLR(optimizer, 1)
    assert describe(model, optimizer).served.name == "SGD"
