"""The optimizer after conversion: the same object, the same class to the outside, a remote step."""

from __future__ import annotations

import copy
import logging
import pickle
import weakref

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import backward
from torch.optim import SGD, Adagrad, AdamW, Optimizer
from torch.optim.lr_scheduler import OneCycleLR, StepLR

from ps.errors import UnsupportedError
from workers.optimizer import convert


class Remote:
    """Counts remote steps; `optimizer` shows which hyper-parameters they saw."""

    def __init__(self) -> None:
        self.steps = 0
        self.grad_enabled: list[bool] = []

    def step(self) -> None:
        self.steps += 1
        self.grad_enabled.append(torch.is_grad_enabled())

    def optimizer_state(self) -> dict[Tensor, dict[str, object]]:
        return {}


@pytest.fixture
def model() -> nn.Linear:
    return nn.Linear(2, 2)


def loss(model: nn.Module) -> Tensor:
    result = model(torch.ones(1, 2)).sum()
    assert isinstance(result, Tensor)
    return result


def test_identity_and_class_stay(model: nn.Linear) -> None:
    """The user's object is converted in place and is still an AdamW; its step is the remote one."""
    optimizer, remote = AdamW(model.parameters()), Remote()
    groups = optimizer.param_groups
    convert(optimizer, remote)
    assert isinstance(optimizer, AdamW) and optimizer.param_groups is groups
    before = [param.detach().clone() for param in model.parameters()]
    backward(loss(model))
    optimizer.step()
    assert remote.steps == 1 and remote.grad_enabled == [False]
    assert all(torch.equal(old, new) for old, new in zip(before, model.parameters(), strict=True))


def test_closure_runs_once_with_gradients_and_its_loss_comes_back(model: nn.Linear) -> None:
    """`step(closure)` evaluates before the push and returns the closure's loss."""
    optimizer, remote = AdamW(model.parameters()), Remote()
    convert(optimizer, remote)
    calls = []

    def closure() -> Tensor:
        calls.append(remote.steps)
        value = loss(model)
        backward(value)
        return value

    value = optimizer.step(closure)
    assert isinstance(value, Tensor) and calls == [0] and remote.steps == 1


@pytest.mark.parametrize("first", ["scheduler", "attach"])
def test_schedulers_work_whichever_comes_first(model: nn.Linear, first: str) -> None:
    """A scheduler made before attach doesn't call the local step; none warns about the order of calls."""
    optimizer, remote = SGD(model.parameters(), lr=1.0), Remote()
    if first == "scheduler":
        schedulers = [StepLR(optimizer, 1, gamma=0.5), StepLR(optimizer, 2, gamma=0.5)]
        convert(optimizer, remote)
    else:
        convert(optimizer, remote)
        schedulers = [StepLR(optimizer, 1, gamma=0.5), StepLR(optimizer, 2, gamma=0.5)]
    for _ in range(2):
        optimizer.step()
        for scheduler in schedulers:
            scheduler.step()
    assert remote.steps == 2
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.5 * 0.5 * 0.5)


def test_one_cycle_moves_betas_in_the_live_groups(model: nn.Linear) -> None:
    """Schedulers that move other hyper-parameters than lr write to the groups that pushes read."""
    optimizer, remote = AdamW(model.parameters(), lr=1e-3), Remote()
    scheduler = OneCycleLR(optimizer, max_lr=0.1, total_steps=10)
    convert(optimizer, remote)
    before = optimizer.param_groups[0]["betas"]
    optimizer.step()
    scheduler.step()
    assert optimizer.param_groups[0]["betas"] != before


@pytest.mark.parametrize("first", ["hooks", "attach"])
def test_step_hooks_run_around_the_remote_step(model: nn.Linear, first: str) -> None:
    """Pre- and post-hooks run once per step, in order, whether they were registered before or after attach."""
    optimizer, remote = SGD(model.parameters(), lr=1.0), Remote()
    seen: list[tuple[str, int]] = []

    def register() -> None:
        optimizer.register_step_pre_hook(lambda *_: seen.append(("pre", remote.steps)))
        optimizer.register_step_post_hook(lambda *_: seen.append(("post", remote.steps)))

    if first == "hooks":
        register()
    convert(optimizer, remote)
    if first == "attach":
        register()
    optimizer.step()
    assert seen == [("pre", 0), ("post", 1)]


def test_grad_scaler_unscales_and_skips_even_with_fused(model: nn.Linear) -> None:
    """An optimizer built with fused=True would take scaled gradients and inf steps; the converted one doesn't."""
    optimizer, remote = AdamW(model.parameters(), fused=True), Remote()
    convert(optimizer, remote)
    assert vars(optimizer)["_step_supports_amp_scaling"] is False
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for poison in (1.0, float("inf")):
        optimizer.zero_grad()
        backward(scaler.scale(loss(model)) * poison)
        scaler.step(optimizer)
        if poison == 1.0:
            assert model.bias.grad is not None and torch.equal(model.bias.grad, torch.ones(2))
        scaler.update()
    assert remote.steps == 1


def test_copies_and_pickles_are_plain_local_optimizers(model: nn.Linear) -> None:
    """A copy is detached from the worker: it is of the user's own class and steps locally."""
    optimizer, remote = AdamW(model.parameters()), Remote()
    StepLR(optimizer, 1)
    convert(optimizer, remote)
    for twin in (copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
        assert type(twin) is AdamW
        twin.step()
    assert remote.steps == 0


def test_load_state_dict_takes_hyper_parameters_only(model: nn.Linear, caplog: pytest.LogCaptureFixture) -> None:
    """State lives on the servers: a loaded one is dropped with a log line, learning rates are taken."""
    local = AdamW(model.parameters(), lr=0.5)
    backward(loss(model))
    local.step()
    optimizer = AdamW(model.parameters(), lr=0.1)
    convert(optimizer, Remote())
    with caplog.at_level(logging.WARNING):
        optimizer.load_state_dict(local.state_dict())
    assert optimizer.param_groups[0]["lr"] == 0.5 and not optimizer.state
    assert "hyper-parameters only" in caplog.text


def test_add_param_group_is_refused(model: nn.Linear) -> None:
    """The plan is fixed at attach; a group added later would silently never be trained."""
    optimizer = SGD(model.parameters(), lr=1.0)
    convert(optimizer, Remote())
    with pytest.raises(UnsupportedError, match=r"add_param_group\(\) after attach\(\) .*a group with lr=0"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(1))]})


def test_adagrads_birth_state_is_dropped_and_no_cycle_keeps_the_optimizer(model: nn.Linear) -> None:
    """The servers keep the state; the re-made scheduler wrapper holds the optimizer weakly, as torch's does."""
    optimizer: Optimizer = Adagrad(model.parameters())
    StepLR(optimizer, 1)
    convert(optimizer, Remote())
    assert not optimizer.state
    gone = weakref.ref(optimizer)
    del optimizer
    assert gone() is None
