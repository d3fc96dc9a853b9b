"""Optimizer state between the servers' shards and the form that a plain torch optimizer keeps it in."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ps.errors import ModelError, UnsupportedError
from ps.optim.spec import ServedOptimizer, StateKey, StateKind
from ps.optim.state import PieceEntries, piece_shape, shape_of, state_dtype
from ps.sharding.spec import ParamSpec, Piece, Shard, ShardingPlan

ParamState = Mapping[str, object]
"""What a torch optimizer keeps in `state[param]`."""

_SCALARS = (StateKind.NUMBER, StateKind.COUNT)


def check(spec: ParamSpec, state: ParamState, optimizer: ServedOptimizer) -> None:
    """Raise `UnsupportedError` or `ModelError`, naming the parameter, for state that the servers can't go on with."""
    known = {key.name: key for key in optimizer.state}
    unknown = [name for name, value in state.items() if name not in known and value is not None]
    if unknown:
        raise UnsupportedError(
            f"the optimizer's state of {spec.name!r} holds {unknown[0]!r}, which torch.optim.{optimizer.name} doesn't "
            "have; the servers would lose it. Attach a newly built optimizer"
        )
    missing = [key.name for key in optimizer.state if not key.optional and state.get(key.name) is None]
    if missing:
        raise ModelError(f"the optimizer's state of {spec.name!r} lacks {missing[0]!r}")
    for name, value in state.items():
        expected = shape_of(known[name], spec.shape) if name in known else None
        if value is not None and (got := _shape(value)) != expected:
            raise ModelError(
                f"the optimizer's state of {spec.name!r} has {name!r} of shape {list(got)}, expected "
                f"{'none' if expected is None else list(expected)}; is it of another model?"
            )


def split(
    shard: Shard, specs: Sequence[ParamSpec], states: Mapping[int, ParamState], optimizer: ServedOptimizer
) -> list[PieceEntries]:
    """State of each of a shard's pieces; `states` is by parameter index, and has passed `check`."""
    dtype = state_dtype(shard.dtype)
    return [_cut(piece, specs[piece.param], states.get(piece.param, {}), optimizer, dtype) for piece in shard.pieces]


def _cut(
    piece: Piece, spec: ParamSpec, state: ParamState, optimizer: ServedOptimizer, dtype: torch.dtype
) -> PieceEntries:
    found: PieceEntries = {}
    for key in optimizer.state:
        value = state.get(key.name)
        if value is None:
            continue
        if key.kind in _SCALARS:
            number = value.item() if isinstance(value, Tensor) else value
            found[key.name] = torch.tensor(number, dtype=torch.int64 if key.kind is StateKind.COUNT else torch.float32)
            continue
        assert isinstance(value, Tensor)
        dense = (value.to_dense() if value.is_sparse else value).detach().to(dtype)
        if key.kind is StateKind.ELEMENTS:
            dense = dense.reshape(-1)[piece.begin : piece.end].view(piece_shape(piece))
        found[key.name] = dense
    return found


@dataclass(slots=True)
class _Gathering:
    """One parameter's state as far as it has come in."""

    spec: ParamSpec
    tensors: dict[str, Tensor] = field(default_factory=dict)
    numbers: dict[str, Tensor] = field(default_factory=dict)
    """Those of the piece with the most steps: pieces differ only while other workers push."""


class Gathered:
    """State of all parameters, put together from shards that come in any order. Not thread-safe."""

    def __init__(self, plan: ShardingPlan, optimizer: ServedOptimizer) -> None:
        self._plan = plan
        self._served = optimizer
        self._params: dict[int, _Gathering] = {}

    def add(self, shard: Shard, pieces: Sequence[PieceEntries]) -> None:
        """Take in what a shard has."""
        for piece, entries in zip(shard.pieces, pieces, strict=True):
            if entries:
                spec = self._plan.signature.params[piece.param]
                self._add(self._params.setdefault(piece.param, _Gathering(spec)), piece, entries)

    def _add(self, into: _Gathering, piece: Piece, entries: PieceEntries) -> None:
        numbers: dict[str, Tensor] = {}
        for key in self._served.state:
            value = entries.get(key.name)
            if value is None:
                continue
            if key.kind in _SCALARS:
                numbers[key.name] = value
            elif key.kind is StateKind.ELEMENTS:
                flat = into.tensors.setdefault(key.name, torch.zeros(into.spec.numel, dtype=value.dtype))
                flat[piece.begin : piece.end] = value.reshape(-1)
            else:
                into.tensors[key.name] = value
        if numbers.get("step", 0) >= into.numbers.get("step", 0):
            into.numbers = numbers

    def state_of(self, index: int, param: Tensor) -> dict[str, object]:
        """What a plain optimizer would keep for a parameter; empty if that has never had a gradient."""
        found = self._params.get(index)
        if found is None:
            return {}
        return {key.name: value for key in self._served.state if (value := _value(key, found, param)) is not None}


def _value(key: StateKey, found: _Gathering, param: Tensor) -> object:
    if key.kind in _SCALARS:
        number = found.numbers.get(key.name)
        return number if number is None or key.kind is StateKind.NUMBER else int(number)
    tensor = found.tensors.get(key.name)
    if tensor is None:
        return None
    if key.kind is not StateKind.ELEMENTS:
        return tensor.to(param.device)
    if key.like_gradient and found.spec.sparse:
        return tensor.view(param.shape).to(param.device).to_sparse(1)
    return torch.empty_like(param, dtype=tensor.dtype, requires_grad=False).copy_(tensor.view(param.shape))


def _shape(value: object) -> tuple[int, ...]:
    return tuple(value.shape) if isinstance(value, Tensor) else ()
