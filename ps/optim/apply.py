"""A torch.optim class run over a shard's flat tensor, with optimizer state kept per piece.

PyTorch keeps a step counter and state per parameter, and skips a parameter without gradient: no decay, no step. A
shard holds stretches of several parameters, so each *piece* has its own counters; maximal runs of present pieces in
the same state are given to the class as one flat tensor. A single counter per shard would give 0.858 where Adam gives
0.800 (a parameter without gradient in the first two steps).

Padding inside a run has zero weights and zero gradients; whatever an element-wise class makes of them stays there.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Protocol, cast

import torch
from torch import Tensor

from ps.errors import UnsupportedError
from ps.optim.spec import ServedOptimizer
from ps.optim.state import PieceEntries
from ps.sharding.spec import Shard
from ps.types import Hyper

State = dict[str, "Tensor | None"]
"""What torch.optim keeps for one parameter: 1-dim tensors of its size, and 0-dim ones such as `step`."""

PieceState = tuple[tuple[str, "float | None"], ...]
"""State of one piece but for its elements: for each key the value of a 0-dim tensor, or None for a flat one.

Two pieces with equal `PieceState` go through the same arithmetic. Empty = no state yet.
"""


class _Group(Protocol):
    def __setitem__(self, key: str, value: object) -> None: ...


@dataclass(frozen=True, slots=True)
class _Run:
    """Consecutive present pieces in the same state."""

    first: int
    last: int
    """Piece indices, half-open."""
    begin: int
    end: int
    """Elements of the flat tensor, half-open."""
    view: Tensor
    """The weights [begin, end)."""


class ShardOptimizer:
    """Applies pushes to one shard. Not thread-safe: the shard's lock guards it."""

    def __init__(self, shard: Shard, optimizer: ServedOptimizer, weights: Tensor, *, exact: bool) -> None:
        """`weights` is the shard's flat tensor of `shard.numel` elements; it is changed in place by `apply`.

        `exact` runs the for-loop kernels, on which splitting a tensor changes no bit; otherwise the fused kernel where
        the class has one for the CPU, else the foreach one.
        """
        self._pieces = shard.pieces
        self._weights = weights
        self._class = cast("type[torch.optim.Optimizer]", getattr(torch.optim, optimizer.name))
        fused = optimizer.fused and not exact and not weights.is_complex()
        self._kernel: dict[str, object] = {"foreach": not exact and not fused}
        if optimizer.fused:
            self._kernel["fused"] = fused
        self._optimizer: torch.optim.Optimizer | None = None
        """Made at the first push, when hyper-parameters are known; its params are the views of `_runs`."""
        self._step: Callable[[torch.optim.Optimizer], object] = lambda _: None
        self._hyper: Hyper = ()
        """Hyper-parameters in force in `_optimizer`."""
        self._flat: dict[str, Tensor] = {}
        """Per-element state of the whole shard, by key. Runs hold slices of it."""
        self._scalars: dict[str, Tensor] = {}
        """An example of each 0-dim state tensor: dtype and device for new ones."""
        self._states: list[PieceState] = [()] * len(shard.pieces)
        """State of each piece; pieces in `_runs` have newer ones in `_optimizer.state`."""
        self._present: bytes | None = None
        """Bitmap for which `_runs` were made. While it stays the same, so do the runs: the pieces of one run take
        the same steps."""
        self._runs: list[_Run] = []
        self._unsettled = False
        """Whether the class has yet to make state for some run."""

    def apply(self, grads: Tensor, present: bytes, hyper: Hyper) -> None:
        """One optimizer step on the pieces whose bit in `present` is set; the others are left alone.

        `grads` is flat, of the weights' size and dtype; it is not kept. `hyper` has passed `check_values`.
        """
        if not any(present):
            return
        if hyper != self._hyper:
            self._use_hyper(hyper)
        if present != self._present:
            self._regroup(present)
        self._take_step(grads)
        if self._unsettled:
            self._settle()

    def state_of(self, piece: int) -> PieceState:
        """State of one piece but for its elements; for checks and status."""
        self._collect()
        return self._states[piece]

    def export_state(self) -> list[PieceEntries]:
        """A copy of the state of each piece."""
        self._collect()
        flat = {key: value.clone() for key, value in self._flat.items()}
        return [self._entries(index, flat) for index in range(len(self._pieces))]

    def import_state(self, pieces: Sequence[PieceEntries]) -> None:
        """Replace the state of each piece, copying it."""
        if self._optimizer is not None:
            self._optimizer.state.clear()
        self._runs, self._present = [], None
        self._flat, self._scalars = {}, {}
        numbers_on = self._weights.device if self._kernel.get("fused") else torch.device("cpu")
        for index, (piece, entries) in enumerate(zip(self._pieces, pieces, strict=True)):
            for key, value in entries.items():
                if not value.dim():
                    self._scalars[key] = value.to(numbers_on, copy=True)
                    continue
                if key not in self._flat:
                    self._flat[key] = torch.zeros_like(self._weights, dtype=value.dtype)
                self._flat[key][piece.offset : piece.offset + piece.numel].copy_(value)
            self._states[index] = _summary(entries)

    def _entries(self, index: int, flat: dict[str, Tensor]) -> PieceEntries:
        piece = self._pieces[index]
        return {
            key: flat[key][piece.offset : piece.offset + piece.numel]
            if number is None
            else torch.full_like(self._scalars[key], number)
            for key, number in self._states[index]
        }

    @property
    def runs(self) -> tuple[tuple[int, int], ...]:
        """Piece ranges of the last push that were applied as one view each."""
        return tuple((run.first, run.last) for run in self._runs)

    def _use_hyper(self, hyper: Hyper) -> None:
        if self._optimizer is None:
            self._optimizer = self._make([self._weights[:0]], hyper)
            self._step = raw_step(self._class)
        group = cast(_Group, self._optimizer.param_groups[0])
        for key, value in hyper:
            group[key] = value
        self._hyper = hyper
        # Momentum switched on in mid-run makes state for runs that had none.
        self._unsettled = True

    def _make(self, params: Sequence[Tensor], hyper: Hyper) -> torch.optim.Optimizer:
        return construct(self._class, params, hyper, self._kernel)

    def _take_step(self, grads: Tensor) -> None:
        assert self._optimizer is not None
        whole = len(self._runs) == 1 and self._runs[0].end - self._runs[0].begin == grads.numel()
        # Fused kernels refuse a list in which only some runs have state yet, so those go one by one.
        for runs in [[run] for run in self._runs] if self._unsettled else [self._runs]:
            for run in runs:
                run.view.grad = grads if whole else grads[run.begin : run.end]
            try:
                self._step(self._optimizer)
            finally:
                for run in runs:
                    run.view.grad = None

    def _regroup(self, present: bytes) -> None:
        """Make the runs for another set of present pieces."""
        assert self._optimizer is not None
        self._collect()
        self._runs = [self._run(first, last) for first, last in self._ranges(present)]
        self._present = present
        self._optimizer.param_groups[0]["params"] = [run.view for run in self._runs]
        self._optimizer.state.clear()
        for run in self._runs:
            if state := self._states[run.first]:
                self._optimizer.state[run.view] = self._restored(run, state)
            else:
                self._unsettled = True

    def _ranges(self, present: bytes) -> list[tuple[int, int]]:
        found: list[tuple[int, int]] = []
        for index, state in enumerate(self._states):
            if not present[index >> 3] >> (index & 7) & 1:
                continue
            if found and found[-1][1] == index and self._states[index - 1] == state:
                found[-1] = (found[-1][0], index + 1)
            else:
                found.append((index, index + 1))
        return found

    def _run(self, first: int, last: int) -> _Run:
        begin = self._pieces[first].offset if first else 0
        end = self._weights.numel()
        if last < len(self._pieces):
            end = self._pieces[last - 1].offset + self._pieces[last - 1].numel
        return _Run(first, last, begin, end, self._weights[begin:end])

    def _restored(self, run: _Run, state: PieceState) -> State:
        return {
            key: self._flat[key][run.begin : run.end] if value is None else torch.full_like(self._scalars[key], value)
            for key, value in state
        }

    def _settle(self) -> None:
        """Move state that the class has just made into the shard's flat tensors."""
        assert self._optimizer is not None
        for run in self._runs:
            state = cast(State, self._optimizer.state[run.view])
            for key, value in state.items():
                if value is None:
                    continue
                if value.dim():
                    state[key] = self._adopt(key, value, run)
                else:
                    self._scalars[key] = value
        self._unsettled = False

    def _adopt(self, key: str, value: Tensor, run: _Run) -> Tensor:
        if key not in self._flat:
            self._flat[key] = torch.zeros_like(self._weights, dtype=value.dtype)
        mine = self._flat[key][run.begin : run.end]
        if mine.data_ptr() != value.data_ptr():
            mine.copy_(value)
        return mine

    def _collect(self) -> None:
        """Write the runs' counters back to their pieces."""
        if self._optimizer is None:
            return
        for run in self._runs:
            state = cast(State, self._optimizer.state.get(run.view, {}))
            self._states[run.first : run.last] = [_summary(state)] * (run.last - run.first)


def _summary(state: Mapping[str, Tensor | None]) -> PieceState:
    return tuple((key, None if value.dim() else float(value)) for key, value in state.items() if value is not None)


def warm_up() -> None:
    """Make torch load what its optimizers need when first used (about 1 s), so that no request waits for it."""
    torch.optim.SGD([torch.zeros(1)], lr=0.0)


def check_values(optimizer: ServedOptimizer, hyper: Hyper) -> None:
    """Let the class check hyper-parameters, as it does when it is constructed. Raises `UnsupportedError`."""
    kind = cast("type[torch.optim.Optimizer]", getattr(torch.optim, optimizer.name))
    try:
        construct(kind, [torch.zeros(1, 1)], hyper, {})  # Muon takes matrices only
    except (ValueError, TypeError, RuntimeError) as error:
        raise UnsupportedError(f"{optimizer.name} refuses its hyper-parameters: {error}") from error


def construct(
    kind: type[torch.optim.Optimizer], params: Sequence[Tensor], hyper: Hyper, kernel: dict[str, object]
) -> torch.optim.Optimizer:
    """The class over `params`, with those of the hyper-parameters that its constructor takes, and choices of kernel.

    A learning rate of 0, to which schedules come, is for the caller to set: SparseAdam's step takes it, its constructor
    doesn't.
    """
    known = accepted(kind.__name__)
    options: dict[str, object] = {key: value for key, value in hyper if key in known and (key, value) != ("lr", 0)}
    return cast(Callable[..., torch.optim.Optimizer], kind)(params, **options, **kernel)


@cache
def accepted(name: str) -> frozenset[str]:
    """Parameters of the class's constructor. AdamW's `defaults` hold a key that it doesn't take."""
    return frozenset(inspect.signature(getattr(torch.optim, name)).parameters)


def raw_step(kind: type[torch.optim.Optimizer]) -> Callable[[torch.optim.Optimizer], object]:
    """`kind.step` without the profiler and grad-mode wrappers, which cost more than a small shard's arithmetic.

    Neither weights nor gradients require grad here, so autograd records nothing in any mode.
    """
    return cast("Callable[[torch.optim.Optimizer], object]", inspect.unwrap(kind.step))
