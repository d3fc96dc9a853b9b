"""What happens to a step whose gradients hold inf or NaN."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch
from torch import Tensor

from ps.errors import ConfigError, NonFiniteGradient
from ps.finite import all_finite
from workers.staging import Staged

log = logging.getLogger(__name__)

POLICIES = ("raise", "skip", "zero")


class Screen:
    """Looks at gradients that are staged, before they are sent. Not thread-safe.

    `raise`: `NonFiniteGradient`, and nothing is sent. `skip`: the step is made without any gradient, so that no weight
    moves and no decay is applied, as if `step()` had not been called; clocks tick. `zero`: elements that are inf or NaN
    become 0. Each names the first parameter at fault; the latter two in the log, and ever more rarely.
    """

    def __init__(self, policy: str, worker: str, names: Sequence[str]) -> None:
        """`names` are the parameters'. Raises `ConfigError` for another policy."""
        if policy not in POLICIES:
            raise ConfigError(f"attach(on_nonfinite={policy!r}) must be one of: {', '.join(POLICIES)}")
        self.hits = 0
        """Steps with inf or NaN so far."""
        self._policy = policy
        self._worker = worker
        self._names = names

    def check(self, outs: Sequence[Staged], present: tuple[bool, ...], step: int) -> tuple[bool, ...]:
        """Per parameter, whether its gradient is to be applied."""
        if all(out.finite() for out in outs):
            return present
        at_fault = self._clean(outs, present)
        if at_fault is None:
            return present
        self.hits += 1
        where = f"the gradient of {self._names[at_fault]!r} holds inf or NaN at step {step} of worker {self._worker}"
        if self._policy == "raise":
            raise NonFiniteGradient(
                f"{where}; nothing of this step was sent and the weights are unchanged. Skip the step "
                "(optimizer.zero_grad()), lower the learning rate, clip gradients, or say "
                "attach(..., on_nonfinite='skip')"
            )
        if self.hits & (self.hits - 1) == 0:  # the 1st, 2nd, 4th, 8th ...
            done = "the step is skipped" if self._policy == "skip" else "such elements are set to 0"
            log.warning("%s; %s (%d so far)", where, done, self.hits)
        return present if self._policy == "zero" else (False,) * len(present)

    def _clean(self, outs: Sequence[Staged], present: Sequence[bool]) -> int | None:
        """The first parameter at fault, in the model's order. Takes out what an earlier step left behind."""
        at_fault: int | None = None
        for out in outs:
            for cut, view in out.pieces:
                if all_finite(view):
                    continue
                if not present[cut.param]:
                    view.zero_()
                    continue
                at_fault = cut.param if at_fault is None else min(at_fault, cut.param)
                if self._policy == "zero":
                    _zero(view)
        return at_fault


def _zero(view: Tensor) -> None:
    real = torch.view_as_real(view) if view.is_complex() else view
    real.nan_to_num_(0.0, 0.0, 0.0)
