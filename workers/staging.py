"""Where each parameter's pieces are in flat memory, and the flat memory for what is sent."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
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


class Section(NamedTuple):
    """How to cut neighbouring shards of one dtype in a message's payload with one call."""

    begin: int
    """Bytes of the payload, half-open."""
    end: int
    dtype: torch.dtype
    sizes: list[int]
    pieces: list[Cut]

    def split(self, payload: Tensor) -> Sequence[Tensor]:
        """Views of `payload`, flat: the pieces' by their `part`, and padding."""
        return payload[self.begin : self.end].view(self.dtype).split_with_sizes(self.sizes)


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

    def sections(self, message: Message, shards: Collection[ShardId]) -> list[Section]:
        """How to cut a payload of `message` to get at the pieces of some of its shards, few tensors at a time.

        Pieces of one parameter that lie side by side become one.
        """
        found: list[Section] = []
        for shard, offset in zip(message.shards, message.offsets, strict=True):
            if shard not in shards:
                continue
            cuts = self.shards[shard]
            end = offset + self.plan.shards[shard].nbytes
            if found and found[-1].end == offset and found[-1].dtype is cuts.dtype:
                found[-1] = self._joined(found[-1], end, cuts)
            else:
                found.append(Section(offset, end, *cuts))
        return found

    def _joined(self, section: Section, end: int, cuts: ShardCuts) -> Section:
        last, first = section.pieces[-1], cuts.pieces[0]
        touch = last.part == len(section.sizes) - 1 and first.part == 0
        parts = len(section.sizes)
        sizes, pieces = [*section.sizes, *cuts.sizes], [cut._replace(part=cut.part + parts) for cut in cuts.pieces]
        if touch and last.param == first.param and last.end == first.begin:
            sizes[parts - 1 : parts + 1] = [section.sizes[-1] + cuts.sizes[0]]
            whole = last.begin == 0 and first.end == self.plan.signature.params[first.param].numel
            one = last._replace(end=first.end, whole=whole)
            pieces = [one, *[cut._replace(part=cut.part - 1) for cut in pieces[1:]]]
            return Section(section.begin, end, section.dtype, sizes, [*section.pieces[:-1], *pieces])
        return Section(section.begin, end, section.dtype, sizes, [*section.pieces, *pieces])

    def message_views(self, message: Message, payload: Tensor) -> Pieces:
        """Pieces of all shards of a message with their views of `payload`; a whole parameter's view has its shape."""
        found: Pieces = []
        for section in self.sections(message, message.shards):
            parts = section.split(payload)
            found += [
                (cut, parts[cut.part].view(cut.shape) if cut.whole else parts[cut.part]) for cut in section.pieces
            ]
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
        sections = layout.sections(message, message.shards)
        self._runs = [self.payload[section.begin : section.end].view(section.dtype) for section in sections]

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
