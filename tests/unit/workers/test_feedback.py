"""Error feedback: nothing is lost, a push counts once or not at all, and training arrives where fp32 arrives."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ps.codec.base import RAW
from ps.codec.dgc import MomentumCorrection
from ps.codec.select import parse
from ps.errors import NonFiniteGradient
from ps.sharding.spec import Piece, Shard
from ps.types import ShardId
from workers.feedback import ErrorFeedback, Residuals, present_spans

LOSSY = ["bf16", "fp16", "int8", "int8:stochastic", "topk:0.02", "topk:0.1:values=bf16", "sign"]
NUMEL = 2600


class Push:
    """A worker's end with error feedback, and what the receiver decodes."""

    def __init__(self, name: str, dtype: torch.dtype = torch.float32, *, momentum: float = 0.0) -> None:
        wide = torch.float32 if dtype.itemsize == 2 else dtype
        self.feedback = ErrorFeedback(
            parse(name), NUMEL, dtype, momentum=MomentumCorrection(momentum, NUMEL, wide) if momentum else None
        )
        self._receiver = parse(name)
        self._room = torch.empty(self.feedback.encoded_bytes(NUMEL, dtype), dtype=torch.uint8)
        self._dtype = dtype

    def stage(
        self, source: Tensor, *, seed: int = 0, scale: float = 1.0, spans: list[tuple[int, int]] | None = None
    ) -> Tensor:
        """What arrives of `source`."""
        nbytes = self.feedback.encode(source, self._room, seed=seed, scale=scale, spans=spans)
        arrived = torch.empty(NUMEL, dtype=self._dtype)
        self._receiver.decode(self._room[:nbytes], arrived)
        return arrived

    def send(self, source: Tensor, *, seed: int = 0) -> Tensor:
        """What arrives of a push that counts."""
        arrived = self.stage(source, seed=seed)
        self.feedback.commit()
        return arrived


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", LOSSY)
@given(seed=st.integers(0, 10**6), size=st.sampled_from([1e-30, 1e-4, 1.0, 1e3]))
@settings(max_examples=4, deadline=None, derandomize=True)
def test_nothing_is_lost(name: str, dtype: torch.dtype, seed: int, size: float) -> None:
    """Σ decoded + residual = Σ gradients, to rounding of the residual's dtype, whatever the codec leaves out."""
    if dtype.itemsize == 2 and size == 1e-30:
        size = 1e-2
    generator = torch.Generator().manual_seed(seed)
    push = Push(name, dtype)
    total = torch.zeros(NUMEL, dtype=torch.float64)
    arrived = torch.zeros(NUMEL, dtype=torch.float64)
    biggest = torch.zeros(NUMEL, dtype=torch.float64)
    for step in range(6):
        gradient = (torch.randn(NUMEL, generator=generator) * size).to(dtype)
        got = push.send(gradient, seed=step).double()
        total += gradient.double()
        arrived += got
        biggest += gradient.double().abs() + got.abs() + push.feedback.residual.double().abs()
    unit = torch.finfo(push.feedback.residual.dtype).eps
    assert ((arrived + push.feedback.residual.double() - total).abs() <= biggest * unit).all()


@pytest.mark.parametrize("name", LOSSY)
def test_an_aborted_push_leaves_no_trace(name: str) -> None:
    """Staged and aborted, or staged again with another gradient: only the committed push has changed the residual."""
    first, second, dropped = torch.randn(NUMEL), torch.randn(NUMEL), torch.randn(NUMEL)
    plain, tried = Push(name), Push(name)
    plain.send(first, seed=1)
    expected = plain.send(second, seed=2)

    tried.stage(dropped, seed=9)
    assert tried.feedback.staged
    tried.feedback.abort()
    assert not tried.feedback.staged
    tried.feedback.commit()  # nothing is staged: nothing happens
    tried.stage(dropped, seed=9)
    tried.send(first, seed=1)
    tried.stage(dropped, seed=9)
    tried.stage(second, seed=3)
    assert torch.equal(tried.send(second, seed=2), expected)
    assert torch.equal(tried.feedback.residual, plain.feedback.residual)


def test_a_refused_gradient_leaves_no_trace() -> None:
    """inf in a gradient raises, drops what was staged before, and keeps the residual."""
    push = Push("int8")
    push.send(torch.randn(NUMEL))
    before = push.feedback.residual.clone()
    bad = torch.randn(NUMEL)
    bad[7] = float("inf")
    push.stage(torch.randn(NUMEL))
    with pytest.raises(NonFiniteGradient):
        push.stage(bad)
    push.feedback.commit()
    assert torch.equal(push.feedback.residual, before)


@pytest.mark.parametrize("name", LOSSY)
def test_residual_is_in_unscaled_units(name: str) -> None:
    """Sources that carry a loss scale, even a changing one, leave the residual of plain gradients (powers of two)."""
    plain, scaled = Push(name), Push(name)
    for step, scale in enumerate((1.0, 1024.0, 0.5)):
        gradient = torch.randn(NUMEL)
        expected = plain.send(gradient, seed=step)
        arrived = scaled.stage(gradient * scale, seed=step, scale=scale)
        scaled.feedback.commit()
        # Subnormal numbers of the wire's dtype aside, scaling by powers of two changes no bit.
        torch.testing.assert_close(arrived / scale, expected, rtol=1e-6, atol=1e-4)
        torch.testing.assert_close(scaled.feedback.residual, plain.feedback.residual, rtol=1e-6, atol=1e-4)


def test_a_factor_at_commit_counts_for_the_gradient() -> None:
    """Clipped at commit by a factor only known then: Σ factor · decoded + residual = Σ factor · gradient."""
    push = Push("topk:0.1")
    total, arrived = torch.zeros(NUMEL, dtype=torch.float64), torch.zeros(NUMEL, dtype=torch.float64)
    for factor in (1.0, 0.25, 0.7):
        gradient = torch.randn(NUMEL)
        got = push.stage(gradient)
        push.feedback.commit(factor)
        total += factor * gradient.double()
        arrived += factor * got.double()
    torch.testing.assert_close(arrived + push.feedback.residual.double(), total, rtol=0, atol=1e-5)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("name", LOSSY)
def test_pieces_without_a_gradient_keep_their_residual(name: str, momentum: float) -> None:
    """What is outside the spans is neither read nor sent, and its residual and momentum wait for its next gradient."""
    push = Push(name, momentum=momentum)
    push.send(torch.randn(NUMEL))
    before = push.feedback.residual.clone()
    assert before[:900].any()
    source = torch.randn(NUMEL)
    source[:900] = float("nan")  # left over memory
    arrived = push.stage(source, spans=[(900, 1000), (1000, NUMEL)])
    if name != "sign":  # the receiver leaves those elements out; only `sign` has no zero
        assert not arrived[:900].any()
    push.feedback.commit()
    assert torch.equal(push.feedback.residual[:900], before[:900])
    assert not torch.equal(push.feedback.residual[900:], before[900:])


def test_momentum_correction_is_the_equation() -> None:
    """With momentum m, what is accumulated is u = m u + g, both cleared of what was sent (Lin et al. 2018, eq. 5-7)."""
    push = Push("topk:0.01", momentum=0.9)
    velocity, residual = torch.zeros(NUMEL), torch.zeros(NUMEL)
    for _ in range(4):
        gradient = torch.randn(NUMEL)
        velocity = 0.9 * velocity + gradient
        residual = residual + velocity
        keep = residual.abs() < residual.abs().topk(26).values[-1]
        arrived = push.send(gradient)
        torch.testing.assert_close(arrived, torch.where(keep, 0, residual), rtol=1e-5, atol=1e-6)
        velocity, residual = velocity * keep, residual * keep
        torch.testing.assert_close(push.feedback.residual, residual, rtol=1e-5, atol=1e-5)


def test_a_leaving_worker_hands_its_residual_back() -> None:
    """`take` moves the residual out, once; with a push staged it is refused."""
    push = Push("sign")
    gradient = torch.randn(NUMEL)
    arrived = push.send(gradient)
    push.stage(gradient)
    last = torch.empty(NUMEL)
    with pytest.raises(ValueError, match="staged"):
        push.feedback.take(last)
    push.feedback.abort()
    assert push.feedback.take(last)
    torch.testing.assert_close(arrived + last, gradient)
    assert not push.feedback.take(last)
    assert not last.any()


@pytest.mark.parametrize("name", LOSSY)
def test_arrives_where_fp32_arrives(name: str) -> None:
    """Gradient descent on a badly scaled quadratic ends as near to the minimum as with fp32 (sign, topk: with EF only).

    f(w) = Σ a_i (w_i - 1)² / 2, a from 0.1 to 1; the codecs that are no contraction element by element stall without.
    """
    curvature = torch.linspace(0.1, 1, NUMEL)

    def descend(push: Push | None, steps: int = 120) -> float:
        weights = torch.zeros(NUMEL)
        for step in range(steps):
            gradient = curvature * (weights - 1)
            # A step size that falls lets the error that is still on its way die out.
            rate = 0.5 / (1 + step / 20)
            weights -= rate * (gradient if push is None else push.send(gradient, seed=step))
        return float((curvature * (weights - 1) ** 2).mean())

    slow = name.startswith("topk")
    steps = 900 if slow else 120
    assert descend(Push(name), steps) <= 1.5 * descend(None, 120) + 1e-4


def test_without_error_feedback_sign_stalls() -> None:
    """The counter-example of Karimireddy et al. 2019, f(w) = ε |w_1 + w_2| + |w_1 - w_2|: w_1 + w_2 never moves.

    The signs of its gradients are always opposite; with error feedback the same codec finds the minimum at 0.
    """
    codec = parse("sign")
    room, arrived = torch.empty(codec.encoded_bytes(2, torch.float32), dtype=torch.uint8), torch.empty(2)
    both, apart = torch.tensor([1.0, 1.0]), torch.tensor([1.0, -1.0])

    def descend(feedback: ErrorFeedback | None) -> float:
        weights = torch.tensor([1.0, 0.5])
        for step in range(300):
            signs = [1.0 if float(weights @ way) >= 0 else -1.0 for way in (both, apart)]
            gradient = 0.5 * signs[0] * both + signs[1] * apart
            nbytes = (feedback or codec).encode(gradient, room)
            codec.decode(room[:nbytes], arrived)
            if feedback is not None:
                feedback.commit()
            weights -= 0.1 / (1 + step / 10) * arrived
        return float(weights.abs().max())

    assert descend(None) >= 0.74
    assert descend(ErrorFeedback(parse("sign"), 2, torch.float32)) < 0.1


def shard(dtype: str = "float32", sizes: tuple[int, ...] = (10, 20, 30), *, id: int = 0) -> Shard:
    """A shard of pieces that each begin at a multiple of 64 bytes."""
    pieces, at = [], 0
    for index, size in enumerate(sizes):
        pieces.append(Piece(param=index, begin=0, end=size, offset=at))
        at += -(-size // 16) * 16
    return Shard(id=ShardId(id), dtype=dtype, group=0, pieces=tuple(pieces), numel=at)


@pytest.mark.parametrize(
    ("present", "spans"),
    [(0b111, None), (0b011, [(0, 48)]), (0b101, [(0, 16), (48, 80)]), (0b110, [(16, 80)]), (0, [])],
)
def test_spans_of_present_pieces(present: int, spans: list[tuple[int, int]] | None) -> None:
    """Pieces with a gradient, neighbours joined, their padding taken in."""
    assert present_spans(shard(), bytes([present])) == spans


def test_shards_that_a_codec_skips_have_no_residual() -> None:
    """Small, complex and 16-bit shards travel raw and take no memory; the others share their scratch memory."""
    shards = [
        shard(sizes=(20,), id=0),
        shard("bfloat16", (5000,), id=1),
        shard(sizes=(5000,), id=2),
        shard(sizes=(9000,), id=3),
    ]
    residuals = Residuals(parse("bf16"), shards)
    assert sorted(residuals.lossy) == [2, 3]
    assert residuals.codec(ShardId(1)) is RAW
    room = torch.empty(residuals.codec(ShardId(1)).encoded_bytes(5008, torch.bfloat16), dtype=torch.uint8)
    assert residuals.encode(ShardId(1), torch.ones(5008, dtype=torch.bfloat16), room) == len(room)
    source = torch.randn(5008)
    residuals.encode(ShardId(2), source, torch.empty(20_000, dtype=torch.uint8))
    residuals.abort()
    residuals.commit()
    assert not residuals.lossy[ShardId(2)].residual.any()
    residuals.encode(ShardId(2), source, torch.empty(20_000, dtype=torch.uint8))
    residuals.commit()
    assert torch.equal(residuals.lossy[ShardId(2)].residual, source - source.bfloat16().float())
