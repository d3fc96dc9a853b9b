"""Optimizer state comes from the servers in the form of plain torch, and goes to them: training goes on bit by bit."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import backward
from torch.optim import Optimizer

from ps.alone import LocalJob, settings
from tests.numerics.cases import CASES, Case
from tests.support.models import batches
from tests.support.oracle import loss_of, weights
from workers import Worker
from workers.config import WorkerConfig

HALF = 5
"""Steps before and after."""

NAMES = (
    "sgd", "sgd_momentum_decay", "adam", "adagrad", "rmsprop", "adadelta", "adamax", "nadam", "radam", "asgd", "rprop",
    "adam_amsgrad_maximize", "adafactor", "adafactor_scalar_unused", "muon", "sparse_sgd", "sparse_sgd_momentum",
    "sparse_adagrad_groups", "sparse_adam", "groups", "unused_frozen_scalar_adam", "tied", "strided", "complex64",
    "transformer_and_lstm", "compiled_before",
)  # fmt: skip
"""Every served class, and models of all kinds, but for 16-bit ones: plain torch knows nothing of their masters."""


def train(model: nn.Module, optimizer: Optimizer, data: Sequence[tuple[Tensor, Tensor]]) -> None:
    dtype = next(model.parameters()).dtype
    torch.manual_seed(3)  # for dropout
    with torch.sparse.check_sparse_tensor_invariants(False):  # type: ignore[no-untyped-call]
        for x, y in data:
            optimizer.zero_grad()
            real = dtype.to_real()
            backward(loss_of(model, x.to(real), y.to(real)))
            optimizer.step()


def built(case: Case) -> tuple[nn.Module, Optimizer]:
    torch.manual_seed(7)
    model = case.model()
    return model, case.optimizer(model)


def worker() -> Worker:
    return Worker(LocalJob(servers=2, settings=settings(shard_bytes=128)).member(), WorkerConfig(message_bytes=384))


def check(case: Case, got: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    for name, value in expected.items():
        if case.bound:
            torch.testing.assert_close(got[name], value, rtol=10 * case.bound, atol=10 * case.bound)
        else:
            assert torch.equal(got[name], value), name


def check_state(case: Case, got: dict[str, Any], expected: dict[str, Any]) -> None:
    assert got["param_groups"] == expected["param_groups"]
    with_elements = {number for number, state in expected["state"].items() if _elements(state)}
    assert got["state"].keys() == with_elements, "parameters without elements have no state on servers"
    for number in with_elements:
        mine, theirs = got["state"][number], expected["state"][number]
        assert list(mine) == [key for key, value in theirs.items() if value is not None]
        for key, value in mine.items():
            other = theirs[key]
            assert type(value) is type(other)
            if not isinstance(value, Tensor):
                assert value == other
                continue
            assert value.layout is other.layout
            other = other.to_dense() if other.is_sparse else other
            value = value.to_dense() if value.is_sparse else value
            assert value.dtype is other.dtype and value.stride() == other.stride()
            check(case, {key: value}, {key: other})


def _elements(state: dict[str, Any]) -> bool:
    return all(value.numel() for value in state.values() if isinstance(value, Tensor))


@pytest.mark.parametrize("name", NAMES)
def test_state_dict_is_that_of_plain_torch_which_goes_on_with_it(name: str) -> None:
    """After some steps `state_dict()` equals plain torch's, entry by entry; a plain optimizer that loads it, over a
    copy of the model, makes the same steps as one that was never attached."""
    case, data = CASES[name], batches(2 * HALF)
    expected, oracle = built(case)
    train(expected, oracle, data[:HALF])
    model, optimizer = built(case)
    with worker() as member:
        member.attach(model, optimizer)
        train(model, optimizer, data[:HALF])
        state = optimizer.state_dict()
        assert not optimizer.state
    check_state(case, state, oracle.state_dict())
    local = copy.deepcopy(model)
    resumed = case.optimizer(local)
    resumed.load_state_dict(state)
    train(local, resumed, data[HALF:])
    train(expected, oracle, data[HALF:])
    check(case, weights(local), weights(expected))


@pytest.mark.parametrize("name", NAMES)
def test_servers_go_on_with_the_state_of_an_optimizer_that_is_attached_midway(name: str) -> None:
    """A plain optimizer that has made steps is attached: its state goes to the servers with the weights."""
    case, data = CASES[name], batches(2 * HALF)
    expected, oracle = built(case)
    train(expected, oracle, data[:HALF])
    train(expected, oracle, data[HALF:])
    model, optimizer = built(case)
    train(model, optimizer, data[:HALF])
    with worker() as member:
        member.attach(model, optimizer)
        train(model, optimizer, data[HALF:])
    check(case, weights(model), weights(expected))


@pytest.mark.parametrize("name", ["adam", "nadam", "adafactor", "sparse_adam", "sgd_momentum_decay"])
def test_a_state_dict_is_loaded_after_attach(name: str) -> None:
    """`worker.load(model, optimizer_state=...)` on a job that has made steps of its own: nothing of those is left."""
    case, data = CASES[name], batches(2 * HALF)
    expected, oracle = built(case)
    train(expected, oracle, data[:HALF])
    saved = copy.deepcopy((expected.state_dict(), oracle.state_dict()))
    model, optimizer = built(case)
    with worker() as member:
        member.attach(model, optimizer)
        train(model, optimizer, data[HALF : HALF + 3])
        member.load(saved[0], optimizer_state=saved[1])
        model.load_state_dict(model.state_dict())  # as wrappers of optimizers do
        member.pull()
        optimizer.load_state_dict(optimizer.state_dict())
        if hasattr(model, "calls"):
            model.calls = expected.calls
        train(model, optimizer, data[HALF:])
    train(expected, oracle, data[HALF:])
    check(case, weights(model), weights(expected))
