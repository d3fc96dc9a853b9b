"""From a codec's name to the codec, per shard; and from a payload to its encoded shards."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from ps.codec.base import FLOATS, MAX_ELEMS, RAW, Codec, check_arrived
from ps.codec.cast import Cast
from ps.codec.frame import Header
from ps.codec.quantize import Int8
from ps.codec.sign import Sign
from ps.codec.topk import TopK
from ps.errors import ConfigError, WireError

NAMES = ("fp32", "bf16", "fp16", "int8", "int8:stochastic", "topk:R", "topk:R:values=bf16", "sign")
"""All names; R is the fraction kept, such as 0.01."""


def parse(name: str) -> Codec:
    """A codec of its own for this name; `ConfigError` listing all names for another."""
    kind, *options = name.split(":")
    codec: Codec | None = None
    if kind == "topk":
        codec = _topk(name, options)
    elif name in ("int8", "int8:stochastic"):
        codec = Int8(stochastic=bool(options))
    elif name in ("bf16", "fp16"):
        codec = Cast(torch.bfloat16 if name == "bf16" else torch.float16)
    elif name == "sign":
        codec = Sign()
    elif name == "fp32":
        codec = RAW
    if codec is None:
        raise ConfigError(f"codec {name!r} is not known; available: {', '.join(NAMES)}")
    return codec


def _topk(name: str, options: list[str]) -> Codec | None:
    if not options or options[1:] not in ([], ["values=bf16"]):
        return None
    try:
        return TopK(float(options[0]), bf16_values=len(options) == 2)
    except ValueError:
        raise ConfigError(f"codec {name!r}: {options[0]!r} is not a fraction in (0, 1], such as topk:0.01") from None


def choose(codec: Codec, numel: int, dtype: torch.dtype) -> Codec:
    """`codec`, or `RAW` for a shard that it would not shrink or can't take. Both ends get the same answer."""
    if dtype not in FLOATS or not 1 <= numel <= MAX_ELEMS:
        return RAW
    return codec if codec.encoded_bytes(numel, dtype) < RAW.encoded_bytes(numel, dtype) else RAW


def split(payload: Tensor, parts: Iterable[tuple[Codec, int, torch.dtype]]) -> list[Tensor]:
    """Cut a payload into its encoded shards, given (codec, numel, dtype) of each in order: views, nothing is copied.

    Only lengths are looked at: `decode` checks the rest. `WireError` where they don't add up.
    """
    check_arrived(payload)
    cuts: list[Tensor] = []
    at = 0
    for codec, numel, dtype in parts:
        rest = payload[at:]
        nbytes = RAW.encoded_bytes(numel, dtype) if codec is RAW else Header.read(rest).nbytes
        if nbytes > rest.numel():
            raise WireError(f"payload: shard {len(cuts)} takes {nbytes} bytes, {rest.numel()} are left")
        cuts.append(rest[:nbytes])
        at += nbytes
    if at != payload.numel():
        raise WireError(f"payload: {payload.numel()} bytes, its {len(cuts)} shards take {at}")
    return cuts
