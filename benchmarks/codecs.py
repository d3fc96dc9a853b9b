"""Codecs: how many bytes they save, what they cost, how far off they are.

    python benchmarks/codecs.py --json result.json

One thread encodes and decodes all shards of a model of normally distributed gradients, in turn, so that nothing stays
in a cache. Time is compared with a plain copy of the same shards. *Pays below* is the speed of a link up to which
sending encoded bytes takes less time, encoding and decoding included, than sending the shard as it is: one after the
other, with nothing overlapped.
"""

from __future__ import annotations

import argparse
import os
from dataclasses import dataclass
from pathlib import Path

from harness import Report, alternate, environment
from in_process import COPY, InProcess

from ps import memory

CODECS = ("fp32", "bf16", "fp16", "int8", "int8:stochastic", "topk:0.01", "topk:0.1", "sign")

TARGETS = {"bf16": "2", "int8": "≥ 3.5", "topk:0.01": "≥ 40"}
"""Times fewer bytes."""


@dataclass(frozen=True, slots=True)
class Measured:
    """A codec's contenders and what does not depend on time."""

    encode: InProcess
    decode: InProcess
    saved: float
    """Times fewer bytes."""
    error: float
    """‖decoded - source‖ / ‖source‖ of one push, without error feedback."""


def measure(name: str, shards: int, numel: int) -> Measured:
    """Encode once, and make the contenders."""
    import torch

    from ps.codec.select import parse

    torch.manual_seed(0)
    codec = parse(name)
    sources = [torch.randn(numel) for _ in range(shards)]
    room = codec.encoded_bytes(numel, torch.float32)
    buffers = [torch.empty(room, dtype=torch.uint8) for _ in sources]
    decoded = torch.empty(numel)
    sizes = [codec.encode(source, buffer) for source, buffer in zip(sources, buffers, strict=True)]
    codec.decode(buffers[0][: sizes[0]], decoded)
    error = float((decoded - sources[0]).norm() / sources[0].norm())

    def encode() -> None:
        for source, buffer in zip(sources, buffers, strict=True):
            codec.encode(source, buffer)

    def decode() -> None:
        for buffer, size in zip(buffers, sizes, strict=True):
            codec.decode(buffer[:size], decoded)

    nbytes = 4 * numel * shards
    return Measured(
        InProcess(f"{name} encode", encode, nbytes), InProcess(f"{name} decode", decode, nbytes),
        nbytes / sum(sizes), error,
    )  # fmt: skip


def copying(shards: int, numel: int) -> InProcess:
    """A plain copy of as many bytes."""
    import torch

    sources, target = [torch.randn(numel) for _ in range(shards)], torch.empty(numel)

    def copy() -> None:
        for source in sources:
            target.copy_(source)

    return InProcess(COPY, copy, 4 * numel * shards)


def main() -> None:
    """Parse, measure, report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mb", type=float, default=50, help="size of the model in 1e6 bytes")
    parser.add_argument("--shard-mb", type=float, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    memory.restart_with_settings(os.environ)
    _one_thread()
    numel = int(options.shard_mb * 1e6 / 4) // 16 * 16
    shards = max(1, round((10 if options.quick else options.mb) / options.shard_mb))
    measured = {name: measure(name, shards, numel) for name in CODECS}
    contenders = [copying(shards, numel)]
    for codec in measured.values():
        contenders += [codec.encode, codec.decode]
    turns = alternate(contenders, rounds=options.rounds, turn_s=0.1 if options.quick else 0.3)
    report = Report(
        name="codecs" + "-quick" * options.quick,
        title=f"Codecs: {shards} shards of {options.shard_mb:g} MB, one thread",
        config={key: str(value) for key, value in vars(options).items()},
        environment=environment({name: os.environ.get(name, "") for name in (memory.HUGE_PAGES, memory.TUNABLES)}),
        columns=("codec", "times fewer bytes", "relative error", "encode GB/s", "decode GB/s", "pays below GB/s"),
        samples=turns.samples,
    )
    for name, codec in measured.items():
        encode, decode = turns.goodput(codec.encode.name), turns.goodput(codec.decode.name)
        report.rows.append(
            (name, f"{codec.saved:.2f}", f"{codec.error:.2g}", str(encode.scaled(1e-9)), str(decode.scaled(1e-9)),
             _pays_below(codec.saved, encode.median, decode.median))
        )  # fmt: skip
        report.ratios[f"{name}: times fewer bytes"] = round(codec.saved, 3)
        if name in TARGETS:
            report.targets[f"{name}: times fewer bytes"] = TARGETS[name]
        report.add_ratio(f"{name}: encode over copy", turns.ratio(codec.encode.name, COPY))
        report.add_ratio(f"{name}: decode over copy", turns.ratio(codec.decode.name, COPY))
    report.write(options.json)


def _pays_below(saved: float, encode: float, decode: float) -> str:
    """1/link > 1/(saved link) + 1/encode + 1/decode."""
    return "never" if saved <= 1.01 else f"{(1 - 1 / saved) / (1 / encode + 1 / decode) / 1e9:.2f}"


def _one_thread() -> None:
    import torch

    torch.set_num_threads(1)


if __name__ == "__main__":
    main()
