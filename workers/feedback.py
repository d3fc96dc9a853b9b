"""Error feedback: what a lossy codec left out of a push is added to the next one (Seide et al. 2014; Karimireddy et
al. 2019; error accumulation of Deep Gradient Compression, Lin et al. 2018).

For the gradient g_t of a shard and the codec C, with the residual r_0 = 0:

    p_t = g_t + r_t          encoded and sent
    r_{t+1} = p_t - C(p_t)   so that Σ C(p_t) + r_T = Σ g_t: nothing is lost, only late

There is one residual per worker and shard. It is lost with a worker that is killed, and only then: one that leaves
hands it back (`take`) and pushes it. It is transactional: `encode` only stages, `commit` makes the push count, `abort`
forgets it. The stage is nothing but references to the gradient and to the encoded bytes, so it takes no memory, and
the second half of the work, r + g - C(p), is done at `commit`, when the bytes are on their way already.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ps.codec.base import RAW, Codec, Scratch
from ps.codec.cast import saturating_copy
from ps.codec.dgc import MomentumCorrection
from ps.codec.select import choose
from ps.errors import NonFiniteGradient
from ps.sharding.spec import Shard
from ps.types import ShardId

Spans = Sequence[tuple[int, int]]
"""Half-open element ranges of a shard, ascending."""


class _Stage(NamedTuple):
    """A push that does not count yet."""

    source: Tensor
    encoded: Tensor
    scale: float
    spans: Spans


class ErrorFeedback:
    """Any codec with error feedback, for one shard of one worker; itself a codec. Not thread-safe.

    The residual is kept in float32 for 16-bit shards and in the shard's dtype for others, in **unscaled units**: where
    sources are `scale` times the gradient (a loss scale), it is scaled on the way in and unscaled at `commit`.
    """

    def __init__(
        self,
        codec: Codec,
        numel: int,
        dtype: torch.dtype,
        *,
        momentum: MomentumCorrection | None = None,
        scratch: Scratch | None = None,
    ) -> None:
        self.codec = codec
        """May be replaced between two calls of `encode`, after a `commit` or `abort`."""
        self._dtype = dtype
        self._momentum = momentum
        self._scratch = scratch or Scratch()
        self._stage: _Stage | None = None
        self.residual = torch.zeros(numel, dtype=residual_dtype(dtype))
        """What was not sent yet; read only."""

    @property
    def name(self) -> str:
        """The codec's."""
        return self.codec.name

    @property
    def elementwise(self) -> bool:
        """The codec's."""
        return self.codec.elementwise

    @property
    def staged(self) -> bool:
        """Whether an encoded push waits for `commit` or `abort`."""
        return self._stage is not None

    def encoded_bytes(self, numel: int, dtype: torch.dtype) -> int:
        """The codec's."""
        return self.codec.encoded_bytes(numel, dtype)

    def encode(
        self, source: Tensor, into: Tensor, *, seed: int = 0, scale: float = 1.0, spans: Spans | None = None
    ) -> int:
        """Encode `source` + scale · residual and stage that. Replaces a stage not committed: the push is sent again.

        Neither `source` nor the bytes written may change before `commit` or `abort`. Only `spans` take part (None =
        all): the others count as zero here and keep their residual; the receiver must leave them out too.
        """
        spans = ((0, source.numel()),) if spans is None else spans
        self._stage = None
        nbytes = self.codec.encode(self._corrected(source.detach(), scale, spans), into, seed=seed)
        self._stage = _Stage(source.detach(), into[:nbytes], scale, spans)
        return nbytes

    def commit(self, factor: float | None = None) -> None:
        """The staged push counts. The receiver multiplies what it decodes by `factor` (None = 1 / scale).

        With another factor, such as one with a clip coefficient in it, the gradient itself is what was multiplied;
        what had been carried over keeps its own size: Σ factor_t C_t + r_T = Σ factor_t source_t still holds.
        """
        stage = self._stage
        if stage is None:
            return
        factor = 1 / stage.scale if factor is None else factor
        decoded = self._scratch.take("shard", len(stage.source), self._dtype)
        self.codec.decode(stage.encoded, decoded)
        for begin, end in stage.spans:
            source, sent = stage.source[begin:end], decoded[begin:end]
            residual = self.residual[begin:end]
            if self._momentum is not None:
                self._momentum.add_to(residual, begin, end, 1.0)
            residual.add_(self._wide(source), alpha=factor)
            residual.sub_(self._wide(sent), alpha=factor)
            if self._momentum is not None:
                self._momentum.commit(begin, end, source, factor, sent)
        self._stage = None

    def abort(self) -> None:
        """The staged push does not count; the residual is as before it."""
        self._stage = None

    def decode(self, encoded: Tensor, into: Tensor) -> None:
        """The codec's."""
        self.codec.decode(encoded, into)

    def take(self, into: Tensor) -> bool:
        """Hand the residual back: move it to `into` (flat, the shard's dtype). False, and zeros, if there is none.

        It is a gradient in unscaled units, to be sent as it is by a worker that leaves. Momentum that goes on is not in
        it. ValueError with a push staged.
        """
        if self._stage is not None:
            raise ValueError("error feedback: commit or abort the staged push before the residual is taken")
        if not saturating_copy(self.residual, into, torch.finfo(into.dtype).max):
            raise NonFiniteGradient("error feedback: the residual holds inf or NaN")
        self.residual.zero_()
        return bool(into.count_nonzero())

    def _corrected(self, source: Tensor, scale: float, spans: Spans) -> Tensor:
        """`source` + scale · residual (+ scale · momentum) within `spans`, else zero; scratch memory."""
        numel = source.numel()
        corrected = self._scratch.take("shard", numel, self.residual.dtype)
        if tuple(spans) != ((0, numel),):
            corrected.zero_()
        for begin, end in spans:
            out = corrected[begin:end]
            torch.add(self._wide(source[begin:end]), self.residual[begin:end], alpha=scale, out=out)
            if self._momentum is not None:
                self._momentum.add_to(out, begin, end, scale)
        if self._dtype is corrected.dtype:
            return corrected
        narrow = self._scratch.take("shard", numel, self._dtype)
        if not saturating_copy(corrected, narrow, torch.finfo(self._dtype).max):
            raise NonFiniteGradient("error feedback: the gradient holds inf or NaN, or is too large with the residual")
        return narrow

    def _wide(self, tensor: Tensor) -> Tensor:
        """`tensor` in the residual's dtype: itself, or a copy in scratch memory."""
        if tensor.dtype is self.residual.dtype:
            return tensor
        return self._scratch.take("wide", tensor.numel(), self.residual.dtype).copy_(tensor)


class Residuals:
    """Error feedback for all shards that a worker pushes. Not thread-safe: it belongs to the thread that encodes.

    Memory: one residual per shard whose codec loses something, and scratch for the largest shard.
    """

    def __init__(self, codec: Codec, shards: Iterable[Shard], *, momentum: float = 0.0) -> None:
        self._codecs: dict[ShardId, Codec] = {}
        self.lossy: dict[ShardId, ErrorFeedback] = {}
        """Shards with a residual; all others travel as they are."""
        scratch = Scratch()
        for shard in shards:
            dtype: torch.dtype = getattr(torch, shard.dtype)
            chosen = choose(codec, shard.numel, dtype)
            if chosen is not RAW:
                velocity = MomentumCorrection(momentum, shard.numel, residual_dtype(dtype)) if momentum else None
                chosen = ErrorFeedback(chosen, shard.numel, dtype, momentum=velocity, scratch=scratch)
                self.lossy[shard.id] = chosen
            self._codecs[shard.id] = chosen

    def encode(
        self,
        shard: ShardId,
        source: Tensor,
        into: Tensor,
        *,
        seed: int = 0,
        scale: float = 1.0,
        spans: Spans | None = None,
    ) -> int:
        """Encode one shard's gradient, see `ErrorFeedback.encode`; returns the bytes written."""
        feedback = self.lossy.get(shard)
        if feedback is None:
            return self._codecs[shard].encode(source, into)
        return feedback.encode(source, into, seed=seed, scale=scale, spans=spans)

    def codec(self, shard: ShardId) -> Codec:
        """What encodes this shard; its `encoded_bytes` is the room it needs."""
        return self._codecs[shard]

    def commit(self, factor: float | None = None) -> None:
        """All staged pushes count."""
        for feedback in self.lossy.values():
            feedback.commit(factor)

    def abort(self) -> None:
        """No staged push counts."""
        for feedback in self.lossy.values():
            feedback.abort()


def residual_dtype(dtype: torch.dtype) -> torch.dtype:
    """float32 for 16-bit shards: what is left out is often too small to be added in 16 bits."""
    return torch.float32 if dtype.itemsize == 2 else dtype


def present_spans(shard: Shard, present: bytes) -> Spans | None:
    """Ranges of the pieces that have a gradient (bitmap, least significant bit first); None if all have one.

    Padding next to such a piece is taken in: it takes part with a gradient of zero, and the receiver leaves it out.
    """
    has = [bool(present[index >> 3] >> (index & 7) & 1) for index in range(len(shard.pieces))]
    if all(has):
        return None
    spans: list[tuple[int, int]] = []
    ends = [piece.offset for piece in shard.pieces[1:]] + [shard.numel]
    for piece, end, here in zip(shard.pieces, ends, has, strict=True):
        if here and spans and spans[-1][1] == piece.offset:
            spans[-1] = (spans[-1][0], end)
        elif here:
            spans.append((piece.offset, end))
    return spans
