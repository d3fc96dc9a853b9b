"""From a model's signature to its plan: big tensors are split, small ones packed.

Parameters of one group and one dtype form a *stream*: laid end to end, each starting at a multiple of `ALIGN_BYTES`;
so do buffers of one policy and one dtype. The streams, end to end, are cut at equal distances, again at multiples of
`ALIGN_BYTES`, and at their own ends; with `whole_tensors` only between tensors. A sparse parameter is a stream of its
own, cut between rows. The distance is chosen so that `loads` are level for 1 to 8 servers. Pure, deterministic, 64-bit
safe.
"""

from __future__ import annotations

import hashlib
import heapq
import json
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

from ps.errors import ConfigError, UnsupportedError
from ps.sharding.layout import align_up
from ps.sharding.spec import (
    BUFFER_DTYPE_BYTES,
    DTYPE_BYTES,
    LOCAL,
    MERGED,
    NO_GROUP,
    ModelSignature,
    ParamSpec,
    Piece,
    Shard,
    ShardingPlan,
)
from ps.types import ShardId

LARGEST_SHARD_BYTES = 8 << 20
"""Chosen sizes stay below this: one shard is one message at most."""

MAX_SHARD_BYTES = 16 << 20
"""Largest size that may be asked for; messages must stay below 32 MiB."""

LEVEL = 1.05
"""Target for (largest load) / (mean load) over servers."""

MOST_SERVERS = 8
"""Server counts for which the chosen size is level."""

FEWEST_SHARDS = 48
"""Fewest equal shards that are level within `LEVEL` for every count from 1 to `MOST_SERVERS`, with room to spare."""

SMALL_MODEL_BYTES = 3 << 20
"""Below this, calls per shard cost more than bytes, so models are cut by `SMALL_MODEL_CUTS`, not in `FEWEST_SHARDS`."""

SMALL_MODEL_CUTS = (127, 126, 125, 119, 102, 85, 84, 60, 48, 43, 26, 20, 18, 16)
"""Relative sizes of few unequal shards, found by search: level within 1.02 on 1 to `MOST_SERVERS` servers."""

CANDIDATES = 64
"""How many shard counts are tried before the best of them is taken."""

_Cut = tuple["_Stream", int, int]
"""A stream and the byte range [begin, end) of one shard in it; multiples of `ALIGN_BYTES`, or of a row."""


@dataclass(frozen=True, slots=True)
class _Stream:
    """Parameters of one group, or buffers of one policy, of one dtype, end to end; or one sparse parameter."""

    group: int
    dtype: str
    buffer: str
    params: tuple[int, ...]
    starts: tuple[int, ...]
    """Byte offset of each parameter in the stream; multiples of `ALIGN_BYTES`."""
    sizes: tuple[int, ...]
    """Bytes of each parameter, without padding; never 0."""
    nbytes: int
    """With padding."""
    row_bytes: int
    """Bytes of a row of a sparse parameter, else 0."""


def make_plan(signature: ModelSignature, shard_bytes: int = 0) -> ShardingPlan:
    """The plan of a model: a pure function of both arguments.

    `shard_bytes` is the size of a shard; 0 chooses one by the model's size. Empty parameters get no piece.
    Raises `UnsupportedError` naming the parameter for a dtype that can't be sharded, `ConfigError` for a bad size.
    """
    if not 0 <= shard_bytes <= MAX_SHARD_BYTES:
        raise ConfigError(f"shard size {shard_bytes} bytes is not from 0 (chosen) to {MAX_SHARD_BYTES}")
    streams = _streams(signature)
    cuts = _cut(streams, align_up(shard_bytes), signature.whole_tensors) if shard_bytes else _choose(signature, streams)
    shards = [_shard(signature, ShardId(index), *cut) for index, cut in enumerate(cuts)]
    return ShardingPlan(
        signature=signature,
        shard_bytes=shard_bytes,
        shards=tuple(shards),
        digest=_digest(signature, shard_bytes, shards),
    )


def loads(sizes: Sequence[int], bins: int) -> list[int]:
    """Bytes per bin when sizes go, largest first, each to the least loaded of `bins` bins."""
    heap = [0] * bins
    for size in sorted(sizes, reverse=True):
        heapq.heapreplace(heap, heap[0] + size)
    return heap


def imbalance(sizes: Sequence[int], servers: int) -> float:
    """Largest load over mean load when shards of `sizes` are placed on `servers` servers; 1.0 for nothing."""
    total = sum(sizes)
    return max(loads(sizes, servers)) * servers / total if total else 1.0


def _streams(signature: ModelSignature) -> tuple[_Stream, ...]:
    """Streams in order of their first parameter."""
    members: dict[tuple[int, str, str, int], list[int]] = {}
    for index, param in enumerate(signature.params):
        _check(param)
        if param.numel:
            alone = index if param.sparse else -1
            members.setdefault((param.group, param.dtype, param.buffer, alone), []).append(index)
    return tuple(
        _stream(signature, group, dtype, buffer, params) for (group, dtype, buffer, _), params in members.items()
    )


def _check(param: ParamSpec) -> None:
    if param.buffer:
        _check_buffer(param)
    elif param.dtype not in DTYPE_BYTES:
        raise UnsupportedError(
            f"parameter {param.name!r} has dtype {param.dtype}, which can't be served; "
            f"served are: {', '.join(DTYPE_BYTES)}"
        )
    if param.group < NO_GROUP:
        raise ConfigError(f"parameter {param.name!r} has group {param.group}; expected {NO_GROUP} (none) or more")
    if param.sparse and not param.shape:
        raise ConfigError(f"parameter {param.name!r} has no dimensions, so its gradient can't be sparse")


def _check_buffer(buffer: ParamSpec) -> None:
    if buffer.dtype not in BUFFER_DTYPE_BYTES:
        raise UnsupportedError(
            f"buffer {buffer.name!r} has dtype {buffer.dtype}, which can't be served; "
            f"served are: {', '.join(BUFFER_DTYPE_BYTES)}"
        )
    if buffer.buffer not in (LOCAL, *MERGED):
        raise ConfigError(
            f"buffer {buffer.name!r} has policy {buffer.buffer!r}; there are {LOCAL}, {', '.join(MERGED)}"
        )
    if buffer.group != NO_GROUP or buffer.sparse:
        raise ConfigError(f"buffer {buffer.name!r} is in group {buffer.group}; buffers have no gradients")


def _stream(signature: ModelSignature, group: int, dtype: str, buffer: str, params: Sequence[int]) -> _Stream:
    sizes = [signature.params[index].numel * BUFFER_DTYPE_BYTES[dtype] for index in params]
    starts: list[int] = []
    at = 0
    for size in sizes:
        starts.append(at)
        at += align_up(size)
    first = signature.params[params[0]]
    row_bytes = first.row_elems * DTYPE_BYTES[dtype] if first.sparse else 0
    return _Stream(group, dtype, buffer, tuple(params), tuple(starts), tuple(sizes), at, row_bytes)


def _choose(signature: ModelSignature, streams: Sequence[_Stream]) -> list[_Cut]:
    """Few shards, none above `LARGEST_SHARD_BYTES`, that are level on 1 to `MOST_SERVERS` servers.

    If there is no such cut (big tensors that must stay whole), the most level of those tried.
    """
    total = sum(stream.nbytes for stream in streams)
    if total < SMALL_MODEL_BYTES and not signature.whole_tensors:
        return _cut_at(streams, _small_model_marks(total))
    fewest = max(FEWEST_SHARDS, -(-total // LARGEST_SHARD_BYTES))
    best, least = list[_Cut](), float("inf")
    for count in range(fewest, fewest + CANDIDATES):
        cuts = _cut(streams, align_up(-(-total // count)), signature.whole_tensors)
        worst = _worst_imbalance(cuts)
        if worst < least:
            best, least = cuts, worst
        if least <= LEVEL:
            break
    return best


def _worst_imbalance(cuts: Sequence[_Cut]) -> float:
    sizes = [end - begin for _, begin, end in cuts]
    return max(imbalance(sizes, servers) for servers in range(1, MOST_SERVERS + 1))


def _small_model_marks(total: int) -> list[int]:
    return [align_up(total * part // sum(SMALL_MODEL_CUTS)) for part in accumulate(SMALL_MODEL_CUTS[:-1])]


def _cut(streams: Sequence[_Stream], size: int, whole: bool) -> list[_Cut]:
    """Cut into shards of `size` bytes, whole tensors only if `whole`."""
    if whole:
        return [cut for stream in streams for cut in _whole_cuts(stream, size)]
    return _cut_at(streams, range(size, sum(stream.nbytes for stream in streams), max(size, 1)))


def _cut_at(streams: Sequence[_Stream], marks: Sequence[int]) -> list[_Cut]:
    """Cut the streams, laid end to end, at `marks` (ascending bytes) and at their own ends."""
    cuts: list[_Cut] = []
    base = 0
    for stream in streams:
        inside = marks[bisect_right(marks, base) : bisect_left(marks, base + stream.nbytes)]
        edges = [0, *_between_rows(stream, [mark - base for mark in inside]), stream.nbytes]
        cuts += [(stream, begin, end) for begin, end in pairwise(edges) if begin < end]
        base += stream.nbytes
    return cuts


def _between_rows(stream: _Stream, marks: Sequence[int]) -> Sequence[int]:
    """`marks` as they are, but in a sparse parameter at the ends of the rows in which they lie."""
    if not stream.row_bytes:
        return marks
    ends = dict.fromkeys(-(-mark // stream.row_bytes) * stream.row_bytes for mark in marks)
    return [end for end in ends if end < stream.sizes[0]]


def _whole_cuts(stream: _Stream, size: int) -> Iterator[_Cut]:
    begin = 0
    for start, length in zip(stream.starts, stream.sizes, strict=True):
        if start > begin and start + length - begin > size:
            yield stream, begin, start
            begin = start
    yield stream, begin, stream.nbytes


def _shard(signature: ModelSignature, shard: ShardId, stream: _Stream, begin: int, end: int) -> Shard:
    """The shard over the stream's bytes [begin, end)."""
    item = BUFFER_DTYPE_BYTES[stream.dtype]
    pieces: list[Piece] = []
    for param, start, length in _overlapping(stream, begin, end):
        first, last = max(begin, start), min(end, start + length)
        shape = signature.params[param].shape
        pieces.append(
            Piece(
                param=param,
                begin=(first - start) // item,
                end=(last - start) // item,
                offset=(first - begin) // item,
                shape=((last - first) // stream.row_bytes, *shape[1:])
                if stream.row_bytes
                else (shape if signature.whole_tensors else None),
            )
        )
    return Shard(
        id=shard,
        dtype=stream.dtype,
        group=stream.group,
        pieces=tuple(pieces),
        numel=align_up(end - begin) // item,
        row_elems=stream.row_bytes // item,
        buffer=stream.buffer,
    )


def _overlapping(stream: _Stream, begin: int, end: int) -> Iterator[tuple[int, int, int]]:
    index = max(0, bisect_right(stream.starts, begin) - 1)
    while index < len(stream.starts) and stream.starts[index] < end:
        if stream.starts[index] + stream.sizes[index] > begin:
            yield stream.params[index], stream.starts[index], stream.sizes[index]
        index += 1


def _digest(signature: ModelSignature, size: int, shards: Sequence[Shard]) -> str:
    """SHA-256 over a canonical JSON form, which starts with its version: 3 where there are buffers, else 2 where
    parameters are sparse, else 1."""
    sparse = [index for index, param in enumerate(signature.params) if param.sparse]
    buffers = [[index, param.buffer] for index, param in enumerate(signature.params) if param.buffer]
    form = [
        3 if buffers else 2 if sparse else 1,
        signature.optimizer,
        signature.whole_tensors,
        [[p.name, list(p.shape), p.dtype, p.group] for p in signature.params],
        size,
        [[s.dtype, s.group, s.numel, [[p.param, p.begin, p.end, p.offset] for p in s.pieces]] for s in shards],
        *([sparse] if sparse or buffers else []),
        *([buffers] if buffers else []),
    ]
    return hashlib.sha256(json.dumps(form, separators=(",", ":")).encode()).hexdigest()
