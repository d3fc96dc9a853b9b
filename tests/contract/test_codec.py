"""One suite over a table of all codecs: sizes, error bounds, determinism, and refusal of whatever else arrives."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ps.codec.base import ALIGN_BYTES, FLOATS, RAW, Codec
from ps.codec.select import choose, parse, split
from ps.errors import NonFiniteGradient, WireError
from workers.feedback import ErrorFeedback

NAMES = [
    "fp32",
    "bf16",
    "fp16",
    "int8",
    "int8:stochastic",
    "topk:0.01",
    "topk:0.3",
    "topk:1",
    "topk:0.1:values=bf16",
    "sign",
]
LOSSY = [name for name in NAMES if name != "fp32"]

SIZES = [1, 2, 7, 8, 63, 64, 255, 256, 257, 1023, 1024, 1025, 2600]
"""Around the blocks of each codec."""

ROUNDOFF = {torch.float64: 2.0**-53, torch.float32: 2.0**-24, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}
"""Unit roundoff: half the distance from 1 to the next number."""


def make(kind: str, numel: int, dtype: torch.dtype, seed: int) -> Tensor:
    """A finite tensor of an adversarial kind."""
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randn(numel, generator=generator, dtype=torch.float64)
    limits = torch.finfo(dtype)
    values = {
        "zeros": noise * 0,
        "negative zeros": noise * 0 * -1,
        "constant": torch.full_like(noise, 0.3),
        "normal": noise * 1e-3,
        "denormal": noise * limits.smallest_normal / 4,
        "smallest": noise.sign() * limits.smallest_normal * limits.eps,
        "huge": noise.sign() * limits.max,
        "mixed": noise * 10 ** (noise * 8),
        "spike": torch.where(torch.arange(numel) == numel // 2, limits.max, noise * 1e-6),
        "mostly zero": torch.where(noise.abs() > 2, noise, 0.0),
    }[kind]
    return values.clamp(limits.min, limits.max).to(dtype)


KINDS = st.sampled_from(
    ["zeros", "negative zeros", "constant", "normal", "denormal", "smallest", "huge", "mixed", "spike", "mostly zero"]
)
tensors = st.builds(make, KINDS, st.sampled_from(SIZES), st.sampled_from(FLOATS), st.integers(0, 1000)) | st.builds(
    torch.tensor, st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1, max_size=40)
)
examples = settings(max_examples=25, deadline=None, derandomize=True)


def encoded(codec: Codec, source: Tensor, *, seed: int = 0, fill: int = 0) -> Tensor:
    """Bytes of `source`, out of a larger buffer of which nothing beyond the bound may be written."""
    most = codec.encoded_bytes(source.numel(), source.dtype)
    room = torch.full((most + 128,), fill, dtype=torch.uint8)
    nbytes = codec.encode(source, room, seed=seed)
    assert 0 < nbytes <= most
    assert nbytes % ALIGN_BYTES == 0 and most % ALIGN_BYTES == 0
    assert torch.equal(room[most:], torch.full((128,), fill, dtype=torch.uint8))
    return room[:nbytes].clone()


def decoded(codec: Codec, data: Tensor, numel: int, dtype: torch.dtype) -> Tensor:
    """What `data` holds; its neighbours in memory stay as they are."""
    memory = torch.full((numel + 128,), 7, dtype=dtype)
    into = memory[64 : 64 + numel]
    try:
        codec.decode(data, into)
    except WireError:
        assert memory.eq(7).all(), "refused, but written to"
        raise
    assert memory[:64].eq(7).all() and memory[64 + numel :].eq(7).all()
    return into


def cut(tensor: Tensor, size: int) -> list[Tensor]:
    """Blocks of a flat tensor."""
    return [tensor[begin : begin + size] for begin in range(0, len(tensor), size)]


def bound_cast(wire: torch.dtype) -> Callable[[Tensor, Tensor], None]:
    """max(u |x|, u n), saturated at the largest value."""

    def check(x: Tensor, y: Tensor) -> None:
        limits = torch.finfo(wire)
        unit = limits.eps / 2
        limit = (x.abs() * unit).clamp(min=unit * limits.smallest_normal) * (1 + 1e-6)
        limit = limit + (x.abs() - limits.max).clamp(min=0)
        assert ((x - y).abs() <= limit).all()

    return check


def bound_int8(steps: float) -> Callable[[Tensor, Tensor], None]:
    """`steps` of a/127 per block, or 2^-100."""

    def check(x: Tensor, y: Tensor) -> None:
        largest = torch.finfo(torch.float32).max
        beyond = (x.abs() - largest).clamp(min=0)
        x = x.clamp(-largest, largest)
        for block, back, extra in zip(cut(x, 256), cut(y, 256), cut(beyond, 256), strict=True):
            top = float(block.abs().max())
            limit = max(top * (steps / 127 + 2**-20), 2.0**-100) + extra
            assert ((block - back).abs() <= limit).all()
        assert (y[x == 0] == 0).all()

    return check


def bound_sparse(ratio: float, *, bf16: bool = False) -> Callable[[Tensor, Tensor], None]:
    """The count of elements is exact, nothing left out is larger than what was sent, and what was sent is exact."""

    def check(x: Tensor, y: Tensor) -> None:
        count = min(max(1, round(ratio * len(x))), int(x.float().count_nonzero()))
        sent = y != 0
        assert int(sent.count_nonzero()) <= count  # fewer only where a value is rounded to zero in bfloat16
        if not bf16:
            assert int(sent.count_nonzero()) == count
            assert torch.equal(x[sent], y[sent])
        if count and bool(sent.any()) and not bool(sent.all()):
            # float64 is compared as rounded to float32.
            assert x[~sent].abs().max() <= x[sent].abs().min() * (1 + 2**-22) + 1e-44
        scale = max(float(x.abs().max()), 1e-44)
        total = float(((x / scale) ** 2).sum())
        slack = 1e-3 if bf16 else 1e-9
        assert float((((x - y) / scale) ** 2).sum()) <= (1 - count / len(x)) * total + slack * total

    return check


def bound_sign(x: Tensor, y: Tensor) -> None:
    """±mean |x| per block, and the block's squared error is its squared length less n s²."""
    x = x.clamp(-torch.finfo(torch.float32).max, torch.finfo(torch.float32).max)
    for block, back in zip(cut(x, 1024), cut(y, 1024), strict=True):
        mean = float(block.abs().mean())
        assert ((back.abs() - mean).abs() <= mean * 2**-18 + 1e-41).all()
        assert (back[block > 0] >= 0).all() and (back[block < 0] <= 0).all()
        scale = float(block.abs().max()) or 1.0
        assert float((((block - back) / scale) ** 2).sum()) <= float(((block / scale) ** 2).sum()) * (1 + 1e-5) + 1e-4


BOUNDS: dict[str, Callable[[Tensor, Tensor], None]] = {
    "fp32": lambda x, y: torch.testing.assert_close(x, y, rtol=0, atol=0),
    "bf16": bound_cast(torch.bfloat16),
    "fp16": bound_cast(torch.float16),
    "int8": bound_int8(0.5),
    "int8:stochastic": bound_int8(1),
    "topk:0.01": bound_sparse(0.01),
    "topk:0.3": bound_sparse(0.3),
    "topk:1": bound_sparse(1),
    "topk:0.1:values=bf16": bound_sparse(0.1, bf16=True),
    "sign": bound_sign,
}


@pytest.fixture(params=NAMES)
def name(request: pytest.FixtureRequest) -> Iterator[str]:
    yield request.param


def test_every_codec_has_a_bound() -> None:
    """A newcomer adds a row to the table."""
    assert set(BOUNDS) == set(NAMES)


@pytest.mark.parametrize("name", NAMES)
@given(source=tensors, seed=st.integers(0, 5))
@examples
def test_error_bound(name: str, source: Tensor, seed: int) -> None:
    """What comes back is as close as the codec's docstring says, for adversarial finite tensors of each dtype."""
    codec = parse(name)
    back = decoded(codec, encoded(codec, source, seed=seed), source.numel(), source.dtype)
    assert back.isfinite().all()
    if source.dtype.itemsize == 2 and name.startswith(("int8", "sign")):
        # Decoding rounds to the shard's dtype: take that half unit out before the codec's own bound is checked.
        unit = ROUNDOFF[source.dtype]
        wide = torch.empty(source.numel())
        parse(name).decode(encoded(codec, source.float(), seed=seed), wide)
        limit = wide.abs() * unit + torch.finfo(source.dtype).smallest_normal * unit
        assert ((back.float() - wide).abs() <= limit).all()
        source, back = source.float(), wide
    BOUNDS[name](source.double(), back.double())


@pytest.mark.parametrize("name", NAMES)
@given(source=tensors)
@examples
def test_bytes_depend_on_input_and_seed_only(name: str, source: Tensor) -> None:
    """Another instance, used or new, and a buffer full of other bytes: the same encoded bytes."""
    codec = parse(name)
    first = encoded(codec, source, seed=3)
    encoded(codec, source.flip(0) * 0.5, seed=9)
    assert torch.equal(encoded(codec, source, seed=3, fill=255), first)
    assert torch.equal(encoded(parse(name), source, seed=3, fill=85), first)


def test_more_than_one_chunk(name: str) -> None:
    """Shards larger than the chunk worked on at a time, with a rest: in bounds, the same on two threads."""
    source = make("normal", 300_001, torch.float32, 1)
    codec = parse(name)
    data = encoded(codec, source, seed=1)
    BOUNDS[name](source.double(), decoded(codec, data, source.numel(), source.dtype).double())
    threads = torch.get_num_threads()
    try:
        for count in (1, 2):
            torch.set_num_threads(count)
            assert torch.equal(encoded(parse(name), source, seed=1), data)
    finally:
        torch.set_num_threads(threads)


def test_memory_is_kept_from_call_to_call(name: str) -> None:
    """Once used, a codec's scratch memory neither grows nor is made anew, and it does not grow with the shard."""
    codec = parse(name)
    scratch = getattr(codec, "_scratch", None)
    sizes = []
    for seed in (1, 2):
        source = make("normal", 600_000, torch.float32, seed)
        decoded(codec, encoded(codec, source), source.numel(), source.dtype)
        sizes.append(scratch.nbytes if scratch else 0)
    assert sizes[0] == sizes[1] <= 1 << 20


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("name", LOSSY)
def test_nonfinite_input_is_refused(name: str, dtype: torch.dtype, value: float) -> None:
    """No lossy codec makes something finite, or something else, out of inf and NaN."""
    codec = parse(name)
    for numel in (1, 1500):
        source = torch.zeros(numel, dtype=dtype)
        source[numel // 2] = value
        with pytest.raises(NonFiniteGradient):
            encoded(codec, source)


def test_raw_passes_nonfinite_values() -> None:
    """`fp32` is the bytes as they are."""
    source = torch.tensor([float("nan"), float("inf"), -0.0, 1.0])
    back = decoded(RAW, encoded(RAW, source), 4, torch.float32)
    assert torch.equal(back.view(torch.int32), source.view(torch.int32))


@pytest.mark.parametrize("name", NAMES)
@given(data=st.data())
@examples
def test_mutated_bytes_raise_or_decode_to_something_finite(name: str, data: st.DataObject) -> None:
    """Changed, cut or lengthened bytes give `WireError` and an untouched tensor, or finite values; nothing else."""
    codec = parse(name)
    source = make("normal", data.draw(st.sampled_from(SIZES)), data.draw(st.sampled_from(FLOATS)), 5)
    arrived = encoded(codec, source)
    for _ in range(data.draw(st.integers(1, 4))):
        # Headers, scales and the first positions lie in front: half of the changes go there.
        at = data.draw(st.integers(0, min(len(arrived), 160) - 1) | st.integers(0, len(arrived) - 1))
        arrived[at] = data.draw(st.integers(0, 255))
    change = data.draw(st.sampled_from(["none", "cut", "cut odd", "longer"]))
    length = data.draw(st.integers(0, len(arrived) // 64 - 1)) * 64
    arrived = {
        "none": arrived,
        "cut": arrived[:length].clone(),
        "cut odd": arrived[: len(arrived) - 3].clone(),
        "longer": torch.cat([arrived, torch.zeros(64, dtype=torch.uint8)]),
    }[change]
    try:
        back = decoded(codec, arrived, source.numel(), source.dtype)
    except WireError:
        return
    assert change == "none" or len(arrived) == RAW.encoded_bytes(source.numel(), source.dtype)
    assert name == "fp32" or back.isfinite().all()


@pytest.mark.parametrize("name", LOSSY)
@given(noise=st.binary(max_size=400), header=st.booleans())
@examples
def test_random_bytes_are_refused(name: str, noise: bytes, header: bool) -> None:
    """Random bytes never decode; behind a true header they are refused or decode to finite values."""
    codec = parse(name)
    source = make("normal", 200, torch.float32, 1)
    true = encoded(codec, source)
    arrived = torch.zeros(len(true), dtype=torch.uint8)
    arrived[: len(noise)] = torch.tensor(list(noise[: len(true)]), dtype=torch.uint8)
    if header:
        arrived[:64] = true[:64]
        try:
            assert decoded(codec, arrived, 200, torch.float32).isfinite().all()
        except WireError:
            return
    else:
        with pytest.raises(WireError):
            decoded(codec, arrived, 200, torch.float32)


def test_another_tensor_is_refused(name: str) -> None:
    """Bytes of one shard don't decode as a shard of another size or dtype."""
    codec = parse(name)
    data = encoded(codec, make("normal", 1024, torch.float32, 1))
    for numel, dtype in (
        (1023 if name != "fp32" else 1000, torch.float32),
        (1024, torch.float64),
        (2048, torch.float32),
    ):
        with pytest.raises(WireError):
            decoded(codec, data, numel, dtype)


@pytest.mark.parametrize("other", NAMES)
def test_another_codecs_bytes_are_refused(name: str, other: str) -> None:
    """Only the same kind of codec, at any ratio or rounding, reads what one wrote."""
    source = make("normal", 1024, torch.float32, 1)
    same = name == other or name.split(":")[0] == other.split(":")[0] != "topk"
    same = same or (name.startswith("topk") and other.startswith("topk") and ("bf16" in name) == ("bf16" in other))
    data = encoded(parse(other), source)
    if same:
        decoded(parse(name), data, 1024, torch.float32)
    else:
        with pytest.raises(WireError):
            decoded(parse(name), data, 1024, torch.float32)


@pytest.mark.parametrize("bad", ["dtype", "2d", "strided", "unaligned"])
def test_what_is_not_flat_bytes_is_refused(name: str, bad: str) -> None:
    """Tensors of another dtype, shape, stride or alignment raise `WireError` before their bytes are looked at."""
    codec = parse(name)
    data = encoded(codec, make("normal", 1024, torch.float32, 1))
    shifted = torch.cat([torch.zeros(1, dtype=torch.uint8), data])[1:]
    arrived = {
        "dtype": data.view(torch.int8),
        "2d": data.view(1, -1),
        "strided": data.repeat_interleave(2)[::2],
        "unaligned": shifted,
    }[bad]
    with pytest.raises(WireError):
        decoded(codec, arrived, 1024, torch.float32)


def test_too_little_room_is_the_callers_fault(name: str) -> None:
    """`encode` writes nothing where the bound does not fit."""
    codec = parse(name)
    source = make("normal", 1024, torch.float32, 1)
    room = torch.zeros(codec.encoded_bytes(1024, torch.float32) - 64, dtype=torch.uint8)
    with pytest.raises(ValueError, match="aligned bytes"):
        codec.encode(source, room)
    assert not room.any()


def test_payload_splits_into_its_shards(name: str) -> None:
    """Shards encoded one behind another come apart by their own lengths; a payload too short or long is refused."""
    codec = parse(name)
    sources = [
        make("normal", numel, dtype, 1)
        for numel, dtype in ((3, torch.float32), (999, torch.float64), (4096, torch.float32))
    ]
    codecs = [choose(codec, source.numel(), source.dtype) for source in sources]
    payload = torch.cat([encoded(one, source) for one, source in zip(codecs, sources, strict=True)])
    parts = [(one, source.numel(), source.dtype) for one, source in zip(codecs, sources, strict=True)]
    for (one, numel, dtype), part, source in zip(parts, split(payload, parts), sources, strict=True):
        kind = name if one is not RAW else "fp32"
        BOUNDS[kind](source.double(), decoded(one, part, numel, dtype).double())
    for wrong in (payload[:-64], torch.cat([payload, payload[:64]])):
        with pytest.raises(WireError):
            for part, (one, numel, dtype) in zip(split(wrong, parts), parts, strict=True):
                decoded(one, part, numel, dtype)


@pytest.mark.parametrize("name", LOSSY)
def test_error_feedback_behind_the_codecs_interface(name: str) -> None:
    """Wrapped in error feedback, a first push has the bytes of the codec alone, and decodes the same."""
    source = make("normal", 2600, torch.float32, 1)
    wrapped: Codec = ErrorFeedback(parse(name), 2600, torch.float32)
    data = encoded(wrapped, source, seed=4)
    assert torch.equal(data, encoded(parse(name), source, seed=4))
    assert torch.equal(decoded(wrapped, data, 2600, torch.float32), decoded(parse(name), data, 2600, torch.float32))
    assert (wrapped.name, wrapped.elementwise) == (parse(name).name, parse(name).elementwise)
