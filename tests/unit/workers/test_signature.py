"""What can be attached, what is refused, and by which words."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DataParallel
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer

from ps.sharding.spec import NO_GROUP
from workers.signature import describe, named_params, unwrap


class MyAdamW(AdamW):
    """Changes defaults only."""


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
