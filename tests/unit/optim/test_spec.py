"""Which optimizers are served, which hyper-parameters travel, and what is refused with which reason."""

from __future__ import annotations

import math

import pytest
import torch

from ps.errors import UnsupportedError
from ps.optim.spec import SERVED, check_hyper, hyper, served


@pytest.mark.parametrize("name", SERVED)
def test_keys_that_travel_are_all_defaults_but_kernel_choices(name: str) -> None:
    """For each class: a torch version that adds a hyper-parameter fails here instead of being ignored."""
    defaults = set(getattr(torch.optim, name)([torch.zeros(1, 1)]).defaults)
    assert defaults - set(served(name).keys) <= {"foreach", "fused", "differentiable", "capturable"}
    assert set(served(name).keys) <= defaults


@pytest.mark.parametrize("name", SERVED)
def test_fused_is_stated_as_torch_has_it(name: str) -> None:
    """`fused` is set exactly for the classes that take the argument."""
    assert ("fused" in getattr(torch.optim, name)([torch.zeros(1, 1)]).defaults) == served(name).fused


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("LBFGS", "closure"),
        ("MyOptimizer", "only classes of torch.optim"),
    ],
)
def test_others_are_refused_with_the_reason(name: str, reason: str) -> None:
    """Each refusal names the class, the reason, and what is served."""
    with pytest.raises(UnsupportedError, match=f"{name}.*{reason}.*AdamW"):
        served(name)


def test_hyper_takes_only_keys_that_travel() -> None:
    """Schedulers' keys, params and kernel choices stay behind; order is the table's."""
    group = torch.optim.SGD([torch.zeros(1)], lr=0.5, momentum=0.9, fused=True).param_groups[0]
    group["initial_lr"] = 1.0
    assert hyper(group, served("SGD")) == (
        ("lr", 0.5),
        ("momentum", 0.9),
        ("dampening", 0),
        ("weight_decay", 0),
        ("nesterov", False),
        ("maximize", False),
    )


def test_tensor_values_are_read() -> None:
    """A learning rate or a beta held in a tensor travels as a plain number."""
    group = torch.optim.Adam([torch.zeros(1)], lr=torch.tensor(0.25), foreach=False).param_groups[0]
    group["betas"] = (torch.tensor(0.5), 0.75)
    values = dict(hyper(group, served("Adam")))
    assert values["lr"] == 0.25
    assert values["betas"] == (0.5, 0.75)
    assert all(type(value) is float for value in (values["lr"], *values["betas"]))


@pytest.mark.parametrize("flag", ["differentiable", "capturable"])
def test_flags_that_change_the_step_are_refused(flag: str) -> None:
    """`differentiable=True` and `capturable=True` are refused by name; False is fine."""
    group = dict(torch.optim.Adam([torch.zeros(1)]).param_groups[0])
    with pytest.raises(UnsupportedError, match=f"Adam with {flag}=True"):
        hyper(group | {flag: True}, served("Adam"))


@pytest.mark.parametrize("value", [math.nan, "fast", object(), (0.1, "x"), True])
def test_values_that_are_no_numbers_are_refused(value: object) -> None:
    """NaN, strings, objects and a flag as learning rate: refused, naming the key."""
    group = dict(torch.optim.SGD([torch.zeros(1)]).param_groups[0])
    with pytest.raises(UnsupportedError, match="SGD: lr"):
        hyper(group | {"lr": value}, served("SGD"))


def test_hyper_from_the_wire_is_checked() -> None:
    """Missing, reordered or ill-typed hyper-parameters are refused; good ones pass."""
    good = hyper(torch.optim.SGD([torch.zeros(1)]).param_groups[0], served("SGD"))
    check_hyper(good, served("SGD"))
    for bad in (good[1:], good[::-1], (("lr", math.nan), *good[1:]), ()):
        with pytest.raises(UnsupportedError):
            check_hyper(bad, served("SGD"))
