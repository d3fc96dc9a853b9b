"""What can be attached, what is refused, and by which words."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DataParallel
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer

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


def with_state(model: nn.Module) -> Optimizer:
    optimizer = Adam(model.parameters())
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    optimizer.step()
    return optimizer


def replaced_step(model: nn.Module) -> Optimizer:
    optimizer = sgd(model)
    optimizer.step = lambda closure=None: None  # type: ignore[method-assign,assignment]
    return optimizer


def foreign(model: nn.Module) -> Optimizer:
    params: list[torch.Tensor] = [*model.parameters(), nn.Parameter(torch.zeros(7))]
    return SGD(params, lr=0.1)


def expanded() -> nn.Module:
    return nn.ParameterList([nn.Parameter(torch.zeros(1).expand(3))])


REFUSED: dict[str, tuple[Callable[[], nn.Module], Callable[[nn.Module], Optimizer], type[Exception], str]] = {
    "own step": (lambda: nn.Linear(2, 2), lambda m: DoubleStep(m.parameters(), lr=0.1), UnsupportedError,
                 "DoubleStep overrides the step of SGD"),
    "own optimizer": (lambda: nn.Linear(2, 2), lambda m: FromScratch(m.parameters()), UnsupportedError,
                      "FromScratch can't be run on the servers"),
    "LBFGS": (lambda: nn.Linear(2, 2), lambda m: torch.optim.LBFGS(m.parameters()), UnsupportedError, "LBFGS"),
    "replaced step": (lambda: nn.Linear(2, 2), replaced_step, UnsupportedError, "was replaced on the object"),
    "state": (lambda: nn.Linear(2, 2), with_state, UnsupportedError, "has state already"),
    "lazy": (lambda: nn.Sequential(nn.LazyLinear(2)), sgd, ModelError, "'0.weight' has no shape yet"),
    "meta": (lambda: nn.Linear(2, 2, device="meta"), sgd, ModelError, "'weight' is on the meta device"),
    "max_norm": (lambda: nn.Sequential(nn.Embedding(3, 2, max_norm=1.0)), sgd, UnsupportedError,
                 "Embedding '0' has max_norm=1.0"),
    "sparse": (lambda: nn.Sequential(nn.EmbeddingBag(3, 2, sparse=True)), sgd, UnsupportedError,
               "EmbeddingBag '0' has sparse=True"),
    "foreign": (lambda: nn.Linear(2, 2), foreign,
                ModelError, "parameter 2 of the optimizer's group 0, shape (7,), is not in the model"),
    "bfloat16": (lambda: nn.Linear(2, 2, dtype=torch.bfloat16), sgd, UnsupportedError, "'weight' is bfloat16"),
    "float16": (lambda: nn.Linear(2, 2, dtype=torch.float16), sgd, UnsupportedError, "'weight' is float16"),
    "complex": (lambda: nn.Linear(2, 2, dtype=torch.complex64), sgd, UnsupportedError, "'weight' is complex64"),
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


def test_schedulers_made_before_do_not_count_as_a_replaced_step() -> None:
    """An LR scheduler wraps `step` on the object; that is known and allowed."""
    model = nn.Linear(2, 2)
    optimizer = sgd(model)
    torch.optim.lr_scheduler.StepLR(optimizer, 1)
    assert describe(model, optimizer).served.name == "SGD"
