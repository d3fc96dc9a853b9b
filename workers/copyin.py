"""Copy-in of weights: what part of a reply goes where, worked out once and kept while the parameters stay in place."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ps.types import ShardId
from workers.lanes import Lane
from workers.routing import Message
from workers.staging import Cut, Layout

_MOST_KEPT = 1024
"""Messages remembered; all are forgotten when there are more, and worked out again as they come."""


@dataclass(slots=True)
class _Share:
    """What one lane copies of one section."""

    parts: list[int] = field(default_factory=list)
    """Which of the tensors that `Section.split` returns."""
    targets: list[Tensor] = field(default_factory=list)
    """Where they go."""
    shaped: list[tuple[Tensor, int]] = field(default_factory=list)
    """(target, part): likewise, into parameters that are not row-major in memory."""

    def add(self, target: Tensor, part: int) -> None:
        """Copy this part there."""
        if target.dim() == 1:
            self.parts.append(part)
            self.targets.append(target)
        else:
            self.shaped.append((target, part))

    def pairs(self, parts: Sequence[Tensor]) -> list[tuple[Tensor, Tensor]]:
        """(to, from)"""
        shaped = [(target, parts[part].view(target.shape)) for target, part in self.shaped]
        return [*zip(self.targets, [parts[part] for part in self.parts], strict=True), *shaped]


@dataclass(slots=True)
class _Way:
    """What one lane copies."""

    lane: Lane
    shares: list[_Share]
    """One for each section."""
    after: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    """(parameter, its row-major scratch), to be copied when all pieces are in."""


class CopyIn:
    """The way of some shards of a message into the parameters. For the thread that owns the model.

    The views of parameters that it keeps share the parameters' version counters, so that autograd and we see what is
    written through them.
    """

    def __init__(
        self,
        layout: Layout,
        message: Message,
        shards: Collection[ShardId],
        params: Sequence[Tensor],
        scratch: Mapping[int, Tensor],
        lanes: Sequence[Lane],
    ) -> None:
        """`params` and `scratch` (of parameters which are split and not row-major) may change; see `current`."""
        self._params = params
        self._scratch = scratch
        self._sections = layout.sections(message, shards)
        self._used = sorted({cut.param for section in self._sections for cut in section.pieces})
        self._places = self._where()
        ways: dict[int, _Way] = {}
        for index in self._used:
            way = ways.setdefault(id(lanes[index]), _Way(lanes[index], [_Share() for _ in self._sections]))
            if index in scratch:
                way.after.append((params[index].detach(), scratch[index]))
        for number, section in enumerate(self._sections):
            for cut in section.pieces:
                ways[id(lanes[cut.param])].shares[number].add(self._target(cut), cut.part)
        self._ways = list(ways.values())

    def current(self) -> bool:
        """Whether all parameters are where they were; if not, make another."""
        return self._places == self._where()

    def run(self, payload: Tensor) -> None:
        """Copy. The payload is only read."""
        for way in self._ways:
            brought = way.lane.bring(payload)
            pairs: list[tuple[Tensor, Tensor]] = []
            for section, share in zip(self._sections, way.shares, strict=True):
                pairs += share.pairs(section.split(brought))
            way.lane.scatter(pairs)
            way.lane.scatter(way.after)

    def _where(self) -> list[tuple[int, int, tuple[int, ...]]]:
        used = [self._params[index] for index in self._used]
        return [(id(param), param.data_ptr(), param.stride()) for param in used]

    def _target(self, cut: Cut) -> Tensor:
        """Where a piece goes: flat where the parameter's memory is row-major, else in the parameter's shape."""
        param = self._scratch.get(cut.param, self._params[cut.param]).detach()
        return param.view(-1)[cut.begin : cut.end] if param.is_contiguous() else param


class CopyIns:
    """Those in use. For the thread that owns the model."""

    def __init__(
        self, layout: Layout, params: Sequence[Tensor], scratch: Mapping[int, Tensor], lanes: Sequence[Lane]
    ) -> None:
        self._layout = layout
        self._params = params
        self._scratch = scratch
        self._lanes = lanes
        self._known: dict[tuple[ShardId, ...], CopyIn] = {}

    @torch.no_grad()
    def run(self, message: Message, payload: Tensor, shards: Sequence[ShardId]) -> None:
        """Copy the weights of `shards` out of a reply to `message` into the parameters. The payload is only read."""
        whole = len(shards) == len(message.shards)
        known = self._known.get(message.shards) if whole else None
        if known is None or not known.current():
            known = CopyIn(self._layout, message, set(shards), self._params, self._scratch, self._lanes)
            if whole:
                self._keep(message, known)
        known.run(payload)

    def _keep(self, message: Message, known: CopyIn) -> None:
        if len(self._known) >= _MOST_KEPT:
            self._known.clear()
        self._known[message.shards] = known
