"""One suite over a table of all codecs: sizes, error bounds, determinism, and refusal of whatever else arrives."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from ps.codec.base import ALIGN_BYTES, FLOATS, RAW, Codec
from ps.codec.select import choose, parse, split
from ps.errors import NonFiniteGradient, WireError
from tests.support.codecs import BOUNDS, KINDS, NAMES, make
from workers.feedback import ErrorFeedback

LOSSY = [name for name in NAMES if name != "fp32"]

SIZES = [1, 2, 7, 8, 63, 64, 255, 256, 257, 1023, 1024, 1025, 2600]
"""Around the blocks of each codec."""

ROUNDOFF = {torch.float64: 2.0**-53, torch.float32: 2.0**-24, torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}
"""Unit roundoff: half the distance from 1 to the next number."""


tensors = st.builds(
    make, st.sampled_from(KINDS), st.sampled_from(SIZES), st.sampled_from(FLOATS), st.integers(0, 1000)
) | st.builds(
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


@pytest.fixture(params=NAMES)
def name(request: pytest.FixtureRequest) -> Iterator[str]:
    yield request.param


def test_every_codec_has_a_bound() -> None:
    """A newcomer adds a row to the table."""
    assert set(BOUNDS) == set(NAMES)


@pytest.mark.parametrize("dtype", FLOATS)
def test_error_bound_on_every_kind(name: str, dtype: torch.dtype) -> None:
    """The bound holds for each adversarial kind of tensor, with whole blocks and a rest."""
    for kind in KINDS:
        check_bound(name, make(kind, 2600, dtype, 1), seed=1)


@pytest.mark.parametrize("name", NAMES)
@given(source=tensors, seed=st.integers(0, 5))
@examples
def test_error_bound(name: str, source: Tensor, seed: int) -> None:
    """What comes back is as close as the codec's docstring says, whatever finite tensor it is."""
    check_bound(name, source, seed)


def check_bound(name: str, source: Tensor, seed: int) -> None:
    """Encode, decode, and hold the result to the codec's bound."""
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
