"""What is particular to one codec: its bytes, its rounding, its limits."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from ps.codec import quantize
from ps.codec.frame import Header
from ps.codec.quantize import largest_scale
from ps.codec.select import parse
from ps.codec.topk import TopK
from ps.errors import WireError


def encode(name: str, source: Tensor, seed: int = 0) -> Tensor:
    """Bytes of `source`."""
    codec = parse(name)
    room = torch.empty(codec.encoded_bytes(source.numel(), source.dtype), dtype=torch.uint8)
    return room[: codec.encode(source, room, seed=seed)]


def through(name: str, source: Tensor, seed: int = 0) -> Tensor:
    """`source`, encoded and decoded."""
    into = torch.empty_like(source)
    parse(name).decode(encode(name, source, seed), into)
    return into


def test_header_on_the_wire() -> None:
    """The header's layout is fixed: little-endian, 64 bytes, zeros at its end."""
    data = encode("int8", torch.ones(300))
    expected = bytes([1, 3, 2, 0]) + (256).to_bytes(4, "little")
    expected += b"".join(value.to_bytes(8, "little") for value in (300, 64 + 64 + 320, 300)) + bytes(32)
    assert bytes(data[:64].tolist()) == expected
    assert Header.read(data).elems == 300


@pytest.mark.parametrize("at", [0, 1, 2, 3, 4, 8, 16, 24, 32, 63])
def test_every_byte_of_the_header_counts(at: int) -> None:
    """A change in any of its fields, or in the zeros behind them, is refused."""
    data = encode("int8", torch.ones(300))
    data[at] += 1
    with pytest.raises(WireError):
        parse("int8").decode(data, torch.empty(300))


@pytest.mark.parametrize(("name", "limit"), [("fp16", 65504.0), ("bf16", torch.finfo(torch.bfloat16).max)])
def test_casts_saturate(name: str, limit: float) -> None:
    """Finite values beyond the range become its largest value, never inf; all others are plain rounding."""
    largest = torch.finfo(torch.float32).max
    source = torch.tensor([largest, -largest, limit, -limit, 1.0, 1e-3])
    dtype = torch.float16 if name == "fp16" else torch.bfloat16
    expected = torch.tensor([limit, -limit, limit, -limit, 1.0, 1e-3]).to(dtype).float()
    assert torch.equal(through(name, source), expected)


def test_stochastic_rounding_is_unbiased() -> None:
    """The mean over seeds is the value itself, within 6 standard errors, where nearest rounding is always off."""
    source = torch.full((512,), 0.3)
    source[::256] = 127.0  # the scale is then 1
    seeds = 400
    total = torch.zeros(512, dtype=torch.float64)
    for seed in range(seeds):
        total += through("int8:stochastic", source, seed)
    mean = (total / seeds)[1:256]
    assert float(through("int8", source)[1]) == 0
    assert ((mean - 0.3).abs() <= 6 * (0.3 * 0.7 / seeds) ** 0.5).all()
    assert abs(float(mean.mean()) - 0.3) <= 6 * (0.3 * 0.7 / seeds / 255) ** 0.5


def test_stochastic_rounding_follows_the_seed() -> None:
    """Another seed rounds differently, the same seed the same; huge and negative seeds are as good."""
    source = torch.randn(5000)
    assert torch.equal(through("int8:stochastic", source, 7), through("int8:stochastic", source, 7))
    assert not torch.equal(through("int8:stochastic", source, 7), through("int8:stochastic", source, 8))
    through("int8:stochastic", source, -(2**70))


def test_stochastic_rounding_stays_in_range(monkeypatch: pytest.MonkeyPatch) -> None:
    """The largest element plus the largest noise would round to 128, which a code can't hold."""
    monkeypatch.setattr(quantize, "_noise", lambda: torch.full((1000,), 0.5 - 2**-18))
    source = torch.tensor([127.0, 127.0, 0.0])
    codec = parse("int8:stochastic")
    monkeypatch.setattr(codec, "_offsets", lambda seed, numel: [0])
    room = torch.empty(codec.encoded_bytes(3, torch.float32), dtype=torch.uint8)
    codec.encode(source, room)
    assert room[128:131].view(torch.int8).tolist() == [127, 127, 0]


def test_blocks_of_next_to_nothing_are_zeros() -> None:
    """Below 2^-100, where 1 / scale would overflow, a block's scale and codes are 0; its neighbours are untouched."""
    source = torch.cat([torch.full((256,), 2.0**-140), torch.full((256,), 2.0**-101), torch.ones(256)])
    data = encode("int8", source)
    assert data[64:76].view(torch.float32).tolist() == pytest.approx([0, 0, 1 / 127])
    assert not data[128 : 128 + 512].any() and data[128 + 512 : 128 + 768].eq(127).all()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_largest_scale_never_overflows(dtype: torch.dtype) -> None:
    """127 steps of the largest scale accepted are finite, and the largest value of the dtype needs no larger one."""
    scale = largest_scale(dtype)
    assert torch.tensor(127 * np.float32(scale)).to(dtype).isfinite()
    top = torch.full((3,), torch.finfo(dtype).max, dtype=dtype)
    assert through("int8", top).isfinite().all()


def test_int8_code_never_sent_is_refused() -> None:
    """-128 would go beyond the block's largest magnitude."""
    data = encode("int8", torch.ones(300))
    data[128:].view(torch.int8)[5] = -128
    with pytest.raises(WireError, match="-128"):
        parse("int8").decode(data, torch.empty(300))


@pytest.mark.parametrize(("name", "at"), [("int8", 64), ("sign", 64)])
@pytest.mark.parametrize("scale", [float("nan"), float("inf"), -1.0, 3.4e38])
def test_scales_out_of_range_are_refused(name: str, at: int, scale: float) -> None:
    """A scale that is negative, not finite, or too large for the shard's dtype raises."""
    data = encode(name, torch.ones(300, dtype=torch.float16))
    data[at : at + 4].view(torch.float32)[0] = scale
    with pytest.raises(WireError, match="scales from"):
        parse(name).decode(data, torch.empty(300, dtype=torch.float16))


def test_sign_bits_behind_the_end_are_refused() -> None:
    """Only what `encode` can have written is taken."""
    data = encode("sign", torch.ones(300))
    data[128 + 37] = 0x80
    with pytest.raises(WireError, match="behind the last"):
        parse("sign").decode(data, torch.empty(300))


def test_topk_positions_take_16_bits_or_32() -> None:
    """One gap of 65536 makes all differences wide; both come back right, first and last element included."""
    near, far = torch.zeros(70_000), torch.zeros(70_000)
    near[[0, 65_535, 69_999]] = torch.tensor([1.0, -2.0, 3.0])
    far[[0, 65_536, 69_999]] = torch.tensor([1.0, -2.0, 3.0])
    assert [Header.read(encode("topk:1", source)).flags for source in (near, far)] == [0, 1]
    for source in (near, far):
        assert torch.equal(through("topk:1", source), source)


@pytest.mark.parametrize("steps", [[1, 0, 5], [0, 1, 1], [1, 1, 199], [65535, 65535, 65535]])
def test_topk_positions_that_do_not_ascend_or_fit_are_refused(steps: list[int]) -> None:
    """Positions must ascend and stay within the shard."""
    source = torch.zeros(200)
    source[[3, 60, 199]] = 1
    data = encode("topk:1", source)
    data[128:134].view(torch.uint16).copy_(torch.tensor(steps))
    with pytest.raises(WireError, match="do not ascend"):
        parse("topk:1").decode(data, torch.empty(200))


@pytest.mark.parametrize("elems", [0, 2, 4, 201, 2**40, 2**64 - 1])
def test_topk_count_fits_the_bytes(elems: int) -> None:
    """The count in the header must be what the body holds."""
    source = torch.zeros(200)
    source[[3, 60, 199]] = 1
    data = encode("topk:1", source)
    data[24:32] = torch.tensor(list(elems.to_bytes(8, "little")), dtype=torch.uint8)
    into = torch.full((200,), 7.0)
    if elems in (2, 4):  # as many bytes, once padded: caught by the positions, or by what stands behind them
        try:
            parse("topk:1").decode(data, into)
        except WireError:
            assert into.eq(7).all()
        return
    with pytest.raises(WireError):
        parse("topk:1").decode(data, into)


def test_topk_ratio_may_change() -> None:
    """A receiver decodes any ratio: warm-up needs no agreement."""
    source = torch.randn(1000)
    codec = TopK(0.5)
    for ratio in (0.5, 0.1, 0.01):
        codec.ratio = ratio
        room = torch.empty(codec.encoded_bytes(1000, torch.float32), dtype=torch.uint8)
        into = torch.empty(1000)
        parse("topk:0.01").decode(room[: codec.encode(source, room)], into)
        assert int(into.count_nonzero()) == round(1000 * ratio)


def test_empty_top_is_a_header() -> None:
    """A shard of zeros takes 64 bytes."""
    data = encode("topk:0.01", torch.zeros(5000))
    assert len(data) == 64
    into = torch.ones(5000)
    parse("topk:0.01").decode(data, into)
    assert not into.any()
