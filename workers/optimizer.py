"""Turns the user's optimizer, in place, into one whose `step` is: push the gradients, take the new weights.

The object stays the same, so schedulers, scalers and hooks that hold it keep working, whichever was made first; it
gets a subclass of its class, so `isinstance` holds. `param_groups` stay live: each push carries their current values.
"""

from __future__ import annotations

import functools
import logging
import weakref
from collections.abc import Callable
from typing import Protocol, SupportsIndex, cast

import torch
from torch import Tensor
from torch.optim import Optimizer

from ps.errors import UnsupportedError

log = logging.getLogger(__name__)


class Stepper(Protocol):
    """Who performs the step."""

    def step(self) -> None:
        """Push the gradients and take the new weights."""
        ...

    def optimizer_state(self) -> dict[Tensor, dict[str, object]]:
        """The state that the servers have, of each parameter that has any."""
        ...


class RemoteStep(Optimizer):
    """Mixin in front of the user's class. Not thread-safe: for the thread that owns the model."""

    _ps_stepper: Stepper
    _ps_local: type[Optimizer]
    """The user's class."""

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Push all gradients to the servers, which run the optimizer, and take the new weights.

        `closure` is called once, with gradients enabled, before the push; its loss is returned. Blocks until the
        weights are in. Raises `LocalWeightEdit` or `NonFiniteGradient` before anything is sent, later `Fenced`,
        `JobFailed`, `CoordinatorLost`, `Refused` or a `TransportError`.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._ps_stepper.step()
        return loss

    def add_param_group(self, param_group: dict[str, object]) -> None:
        """Refused: the plan of shards is fixed when the model is attached."""
        raise UnsupportedError(
            "add_param_group() after attach() is not served: which parameters are trained, and in which group, decides "
            "how the model lies on the servers, and is agreed on once. Give all groups to the optimizer before "
            "attach(): a group with lr=0, or parameters with requires_grad=False, wait there until they are wanted"
        )

    def state_dict(self) -> dict[str, object]:
        """What a plain optimizer of the user's class would return, and takes in: the state comes from the servers.

        Blocks while all of it is gathered, about as long as a `pull()` of as many bytes. While other workers push,
        each shard's state is of its own moment.
        """
        gathered = self._ps_stepper.optimizer_state()
        self.state.update(gathered)
        try:
            return super().state_dict()
        finally:
            for param in gathered:
                del self.state[param]

    def load_state_dict(self, state_dict: dict[str, object]) -> None:
        """Take the hyper-parameters only: the state is on the servers, and stays as it is there."""
        if state_dict.get("state"):
            log.warning(
                "load_state_dict after attach takes hyper-parameters only: the optimizer state is on the servers, and "
                "worker.load(optimizer_state=...) replaces it"
            )
        super().load_state_dict({**state_dict, "state": {}})

    def __reduce_ex__(self, protocol: SupportsIndex) -> tuple[object, ...]:
        """Copies and pickles are plain local optimizers of the user's class, detached from the worker."""
        return _blank, (self._ps_local,), self.__getstate__()


def _blank(local: type[Optimizer]) -> Optimizer:
    """An optimizer without content, for copies to fill."""
    return local.__new__(local)


_remote_classes: dict[type[Optimizer], type[RemoteStep]] = {}  # one entry per optimizer class of the program


def remote_class(local: type[Optimizer]) -> type[RemoteStep]:
    """The subclass of `local` whose step is remote; the same one each time."""
    if local not in _remote_classes:
        _remote_classes[local] = _make_class(local)
    return _remote_classes[local]


def _make_class(local: type[Optimizer]) -> type[RemoteStep]:
    body = {
        "__doc__": f"{local.__name__} that runs on parameter servers.",
        "__module__": __name__,
        "_step_supports_amp_scaling": False,
        # A compiled training step must not look into the push. Loads nothing: making an optimizer has loaded dynamo.
        "step": torch.compiler.disable(RemoteStep.step),  # type: ignore[no-untyped-call]
    }
    return cast("type[RemoteStep]", type(f"Remote{local.__name__}", (RemoteStep, local), body))


def convert(optimizer: Optimizer, stepper: Stepper) -> None:
    """Make `optimizer.step` remote, in place. The caller has checked that it can be served."""
    local = type(optimizer)
    tracked = vars(optimizer).pop("step", None) is not None
    optimizer.state.clear()  # Adagrad's fresh state; the servers keep their own
    optimizer.__class__ = remote_class(local)
    remote = cast(RemoteStep, optimizer)
    remote._ps_stepper = stepper
    remote._ps_local = local
    # With True (left by fused=True) GradScaler would neither unscale gradients nor skip steps with inf in them.
    remote._step_supports_amp_scaling = False  # type: ignore[attr-defined]
    remote._patch_step_function()  # hooks run around the class's step only once it is patched
    if tracked:
        _track_calls(remote)


def _track_calls(optimizer: RemoteStep) -> None:
    """The wrapper that an LR scheduler puts around `step`, made again around the remote one.

    The scheduler's own was made around the local step, and would go on calling that.
    """
    reference = weakref.ref(optimizer)
    function = type(optimizer).step

    @functools.wraps(function)
    def step(*args: object, **kwargs: object) -> object:
        owner = reference()
        assert owner is not None
        owner._opt_called = True  # type: ignore[attr-defined]
        return function.__get__(owner, type(owner))(*args, **kwargs)

    step._wrapped_by_lr_sched = True  # type: ignore[attr-defined]
    optimizer.step = step  # type: ignore[method-assign,assignment]
