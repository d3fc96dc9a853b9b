"""Which optimizers are served, which hyper-parameters travel, and what is refused with which reason."""

from __future__ import annotations

import inspect
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


CLASSES = [
    name
    for name, kind in sorted(vars(torch.optim).items())
    if inspect.isclass(kind) and issubclass(kind, torch.optim.Optimizer) and kind is not torch.optim.Optimizer
]


@pytest.mark.parametrize("name", CLASSES)
def test_every_class_of_torch_is_decided(name: str) -> None:
    """Each class is served, or refused with a reason of its own: one that a new torch brings fails here."""
    if name in SERVED:
        assert served(name).name == name
        return
    with pytest.raises(UnsupportedError, match=f"optimizer {name} can't be run on the servers: (?!only classes)"):
        served(name)


@pytest.mark.parametrize("name", SERVED)
@pytest.mark.parametrize("sparse", [False, True])
def test_kinds_of_gradients_are_stated_as_torch_has_them(name: str, sparse: bool) -> None:
    """A class takes dense or sparse gradients exactly if the table says so."""
    param = torch.zeros(3, 2)
    param.grad = torch.ones(3, 2).to_sparse(1) if sparse else torch.ones(3, 2)
    optimizer = getattr(torch.optim, name)([param])
    if served(name).sparse if sparse else served(name).dense:
        with torch.sparse.check_sparse_tensor_invariants(False):  # type: ignore[no-untyped-call]
            optimizer.step()
        return
    with pytest.raises(RuntimeError, match=f"does not support {'sparse' if sparse else 'dense'} gradients"):
        optimizer.step()


@pytest.mark.parametrize("name", SERVED)
def test_complex_is_stated_as_torch_has_it(name: str) -> None:
    """A class takes complex parameters exactly if the table says so."""
    param = torch.zeros(3, 2, dtype=torch.complex64)
    param.grad = torch.ones_like(param)

    def step() -> None:
        getattr(torch.optim, name)([param]).step()

    if served(name).complex:
        step()
        return
    with pytest.raises((RuntimeError, ValueError), match="does not support complex"):
        step()


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


def test_values_that_are_no_numbers_where_the_class_takes_them() -> None:
    """Adafactor's eps has a None in it, Muon's rule for the learning rate is a word or None."""
    group = torch.optim.Adafactor([torch.zeros(1)]).param_groups[0]
    values = hyper(group, served("Adafactor"))
    assert dict(values)["eps"] == (None, 1e-3)
    check_hyper(values, served("Adafactor"))
    group = dict(torch.optim.Muon([torch.zeros(1, 1)], adjust_lr_fn="match_rms_adamw").param_groups[0])
    assert dict(hyper(group, served("Muon")))["adjust_lr_fn"] == "match_rms_adamw"
    assert dict(hyper(group | {"adjust_lr_fn": None}, served("Muon")))["adjust_lr_fn"] is None
    with pytest.raises(UnsupportedError, match="Muon: adjust_lr_fn is 3; expected a string or None"):
        hyper(group | {"adjust_lr_fn": 3}, served("Muon"))


def test_hyper_from_the_wire_is_checked() -> None:
    """Missing, reordered or ill-typed hyper-parameters are refused; good ones pass."""
    good = hyper(torch.optim.SGD([torch.zeros(1)]).param_groups[0], served("SGD"))
    check_hyper(good, served("SGD"))
    for bad in (good[1:], good[::-1], (("lr", math.nan), *good[1:]), ()):
        with pytest.raises(UnsupportedError):
            check_hyper(bad, served("SGD"))
