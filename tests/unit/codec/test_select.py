"""Names of codecs, and which shards they are used for."""

from __future__ import annotations

import pytest
import torch

from ps.codec.base import RAW
from ps.codec.select import NAMES, choose, parse, split
from ps.errors import ConfigError, WireError

WRITTEN = [
    "fp32",
    "bf16",
    "fp16",
    "int8",
    "int8:stochastic",
    "topk:0.01",
    "topk:1e-05",
    "topk:0.25:values=bf16",
    "sign",
]


@pytest.mark.parametrize("name", WRITTEN)
def test_name_makes_an_equal_codec(name: str) -> None:
    """A codec's name, parsed, gives a codec of the same name: what one end says, the other end can use."""
    codec = parse(name)
    assert parse(codec.name).name == codec.name
    assert float(codec.name.split(":")[1]) == float(name.split(":")[1]) if "topk" in name else codec.name == name


@pytest.mark.parametrize(
    "name",
    ["", "gzip", "int4", "int8:x", "int8:stochastic:x", "bf16:", "sign:2", "topk", "topk:0.1:values=fp16", "fp32:"],
)
def test_unknown_names_list_what_there_is(name: str) -> None:
    """A name that is not known raises an error with all names."""
    with pytest.raises(ConfigError) as caught:
        parse(name)
    assert repr(name) in str(caught.value)
    assert all(known in str(caught.value) for known in NAMES)


@pytest.mark.parametrize("ratio", ["0", "-0.1", "1.01", "nan", "inf", "x", ""])
def test_ratio_is_a_fraction(ratio: str) -> None:
    """topk keeps more than nothing and at most all."""
    with pytest.raises(ConfigError, match="fraction in"):
        parse(f"topk:{ratio}")


@pytest.mark.parametrize(
    ("name", "numel", "dtype", "used"),
    [
        ("bf16", 1024, torch.float32, True),
        ("bf16", 32, torch.float32, False),  # 64 + 64 bytes against 128
        ("bf16", 1 << 20, torch.bfloat16, False),
        ("fp16", 1 << 20, torch.bfloat16, False),
        ("int8", 1 << 20, torch.float16, True),
        ("sign", 1024, torch.float64, True),
        ("topk:0.01", 1 << 20, torch.float32, True),
        ("topk:0.6", 1 << 20, torch.float32, False),
        ("topk:0.6:values=bf16", 1 << 20, torch.float32, True),
        ("int8", 1 << 20, torch.complex64, False),
        ("int8", 0, torch.float32, False),
        ("int8", 2**31 + 3, torch.float32, False),
        ("int8", 2**31 - 1, torch.float32, True),
    ],
)
def test_codec_that_would_not_shrink_a_shard_is_skipped(name: str, numel: int, dtype: torch.dtype, used: bool) -> None:
    """Raw stands in for shards that are too small, of too few bits, not of floats, or too large."""
    codec = parse(name)
    assert choose(codec, numel, dtype) is (codec if used else RAW)


@pytest.mark.parametrize(
    ("name", "least"),
    [("bf16", 1.99), ("fp16", 1.99), ("int8", 3.9), ("topk:0.01", 60), ("topk:0.01:values=bf16", 90), ("sign", 30)],
)
def test_ratio_on_a_large_shard(name: str, least: float) -> None:
    """Each codec sends as many times less as it promises (bytes written, not a bound)."""
    source = torch.randn(1 << 18)
    codec = parse(name)
    nbytes = codec.encode(source, torch.empty(codec.encoded_bytes(len(source), source.dtype), dtype=torch.uint8))
    assert source.nbytes / nbytes >= least


@pytest.mark.parametrize("name", ["fp32", "int8"])
def test_empty_payload_is_refused(name: str) -> None:
    """A payload without bytes holds no shard."""
    with pytest.raises(WireError):
        split(torch.empty(0, dtype=torch.uint8), [(parse(name), 64, torch.float32)])
