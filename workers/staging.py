"""Where each parameter's pieces are in flat memory, and the flat memory for what is sent."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from ps.finite import all_finite
from ps.sharding.spec import BUFFER_DTYPE_BYTES, Piece, Shard, ShardingPlan
from ps.types import ShardId
from workers.lanes import Lane
from workers.routing import Message


class Cut(NamedTuple):
    """Where one piece lies in its shard and in its parameter."""

    param: int
    begin: int
    end: int
    whole: bool
    shape: tuple[int, ...]
    part: int
    """Which of the tensors that `split_with_sizes` returns."""


class ShardCuts(NamedTuple):
    """How to cut a shard's flat tensor with one call."""

    dtype: torch.dtype
    sizes: list[int]
    pieces: list[Cut]


Pieces = list[tuple[Cut, Tensor]]
"""Pieces with their views of some flat memory."""


class Layout:
    """Where each parameter's pieces are, shared by staging and copy-in. Immutable after construction."""

    def __init__(self, plan: ShardingPlan) -> None:
        self.plan = plan
        self.shards = [self._cuts(shard) for shard in plan.shards]

    def _cuts(self, shard: Shard) -> ShardCuts:
        sizes: list[int] = []
        pieces: list[Cut] = []
        at = 0
        for piece in shard.pieces:
            if piece.offset > at:
                sizes.append(piece.offset - at)
            pieces.append(self._cut(piece, len(sizes)))
            sizes.append(piece.numel)
            at = piece.offset + piece.numel
        if shard.numel > at:
            sizes.append(shard.numel - at)
        return ShardCuts(torch_dtype(shard.dtype), sizes, pieces)

    def _cut(self, piece: Piece, index: int) -> Cut:
        spec = self.plan.signature.params[piece.param]
        whole = piece.begin == 0 and piece.end == spec.numel
        return Cut(piece.param, piece.begin, piece.end, whole, spec.shape, index)

    def views(self, shard: ShardId, region: Tensor) -> Pieces:
        """Pieces of a shard with their views of `region`, its bytes; a whole parameter's view has its shape."""
        cuts = self.shards[shard]
        parts = region.view(cuts.dtype).split_with_sizes(cuts.sizes)
        # Reshaping costs more than the copy of a tiny tensor, and most of these are flat already.
        return [
            (cut, parts[cut.part].view(cut.shape) if cut.whole and len(cut.shape) != 1 else parts[cut.part])
            for cut in cuts.pieces
        ]

    def message_views(self, message: Message, payload: Tensor) -> Pieces:
        """Pieces of all shards of a message with their views of `payload`."""
        found: Pieces = []
        for shard, offset in zip(message.shards, message.offsets, strict=True):
            found += self.views(shard, payload[offset : offset + self.plan.shards[shard].nbytes])
        return found

    def split_params(self) -> set[int]:
        """Parameters of which some shard holds only a part."""
        return {cut.param for cuts in self.shards for cut in cuts.pieces if not cut.whole}


def torch_dtype(name: str) -> torch.dtype:
    """The dtype with this torch name. `name` is a key of `BUFFER_DTYPE_BYTES`."""
    dtype = getattr(torch, name) if name in BUFFER_DTYPE_BYTES else None
    assert isinstance(dtype, torch.dtype), name
    return dtype


@dataclass(slots=True)
class _Part:
    """What one lane brings to a message."""

    lane: Lane
    pieces: Pieces = field(default_factory=list)
    """Where it copies to."""
    moves: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    """(host memory, flat memory on the device): what moves on from there."""


class Staged(Protocol):
    """A message, and the memory in which it is made ready to be sent."""

    message: Message
    """What is sent, and how the reply is laid out."""
    payload: Tensor
    """Owns exactly its storage: TensorPipe sends whole storages."""
    pieces: Pieces
    """With their views of `payload`."""
    rows: dict[ShardId, int]
    """Rows of each shard in `payload`, where gradients travel as rows."""

    @property
    def source(self) -> Message:
        """How `payload` is laid out."""
        ...

    def gather(self, source: Callable[[Cut], Tensor | None]) -> None:
        """Copy what `source` has for each piece (on its parameter's device); pieces without stay as they are."""
        ...

    def ready(self) -> None:
        """Wait until everything gathered is in `payload`."""
        ...

    def finite(self) -> bool:
        """Whether all of `payload` is finite."""
        ...


class Outgoing:
    """A message and its staging memory, which owns exactly its storage (TensorPipe sends whole storages).

    `lanes` has one entry per parameter; parameters on the same device share theirs.
    """

    def __init__(self, layout: Layout, message: Message, lanes: Sequence[Lane]) -> None:
        self.message = message
        self.rows: dict[ShardId, int] = {}
        pinned = any(lane.pinned for lane in lanes)
        self.payload = torch.zeros(message.nbytes, dtype=torch.uint8, pin_memory=pinned)
        self.pieces = layout.message_views(message, self.payload)
        """In host memory."""
        self._parts = list(self._split(layout, lanes))
        self._runs = list(self._by_dtype(layout))

    @property
    def source(self) -> Message:
        """See `Staged`."""
        return self.message

    def gather(self, source: Callable[[Cut], Tensor | None]) -> None:
        """See `Staged`."""
        for part in self._parts:
            pairs = [(view, tensor) for cut, view in part.pieces if (tensor := source(cut)) is not None]
            part.lane.gather(pairs, part.moves)

    def ready(self) -> None:
        """See `Staged`."""
        for part in self._parts:
            part.lane.ready()

    def finite(self) -> bool:
        """Whether all of the staging memory is finite: one pass per dtype."""
        return all(all_finite(run) for run in self._runs)

    def _split(self, layout: Layout, lanes: Sequence[Lane]) -> list[_Part]:
        parts: dict[int, _Part] = {}
        for cut, view in self.pieces:
            lane = lanes[cut.param]
            part = parts.setdefault(id(lane), _Part(lane))
            if lane.flat is None:
                part.pieces.append((cut, view))
        for part in parts.values():
            if part.lane.flat is not None:
                self._lay_flat(layout, lanes, part, part.lane.flat)
        return list(parts.values())

    def _lay_flat(self, layout: Layout, lanes: Sequence[Lane], part: _Part, device: torch.device) -> None:
        """Flat memory on the device, in the message's layout, and which stretches of it move to the host."""
        flat = torch.zeros(self.message.nbytes, dtype=torch.uint8, device=device)
        begin: int | None = None
        for cut, view in layout.message_views(self.message, flat):
            mine = lanes[cut.param] is part.lane
            at = int(view.storage_offset()) * view.element_size()
            if mine:
                part.pieces.append((cut, view))
            if mine and begin is None:
                begin = at
            elif not mine and begin is not None:
                part.moves.append((self.payload[begin:at], flat[begin:at]))
                begin = None
        if begin is not None:
            part.moves.append((self.payload[begin:], flat[begin:]))

    def _by_dtype(self, layout: Layout) -> list[Tensor]:
        """The payload as few tensors of one dtype each."""
        runs: list[Tensor] = []
        begin, dtype = 0, None
        for shard, offset in zip(self.message.shards, self.message.offsets, strict=True):
            if dtype not in (None, layout.shards[shard].dtype):
                runs.append(self.payload[begin:offset].view(dtype))
                begin = offset
            dtype = layout.shards[shard].dtype
        if dtype is not None and self.message.nbytes > begin:
            runs.append(self.payload[begin:].view(dtype))
        return runs
