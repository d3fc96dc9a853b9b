"""The optimizer on the server, against the machine's memory: each class in GB/s, and as a share of a plain copy's.

    python benchmarks/server_apply.py --json result.json

One thread applies pushes to all shards of a model in turn, so that nothing stays in a cache, exactly as servers do
(`ps.optim.apply`). An optimizer reads and writes several arrays; its *roofline* is the rate at which a plain copy
moves that many bytes. Since a plain copy also reads what it overwrites, optimizers can do better than it. Runs in one
process, which starts itself again with the memory settings.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from harness import Report, Stats, alternate, environment
from in_process import COPY, InProcess

from ps import memory
from ps.optim.spec import served
from ps.sharding.partition import make_plan
from ps.sharding.spec import ModelSignature, ParamSpec, Shard
from ps.types import Hyper

ADAM: Hyper = (
    ("lr", 1e-3), ("betas", (0.9, 0.999)), ("eps", 1e-8), ("weight_decay", 0.01),
    ("amsgrad", False), ("maximize", False), ("decoupled_weight_decay", False),
)  # fmt: skip


def sgd(momentum: float) -> Hyper:
    """Hyper-parameters of SGD."""
    return (
        ("lr", 0.1), ("momentum", momentum), ("dampening", 0.0), ("weight_decay", 0.0), ("nesterov", False),
        ("maximize", False),
    )  # fmt: skip


OPTIMIZERS: dict[str, tuple[str, Hyper, int]] = {
    "SGD": ("SGD", sgd(0.0), 3),
    "SGD, momentum": ("SGD", sgd(0.9), 5),
    "Adam": ("Adam", ADAM, 7),
    "AdamW": ("AdamW", (*ADAM[:-1], ("decoupled_weight_decay", True)), 7),
    "Adagrad": (
        "Adagrad",
        (("lr", 0.1), ("lr_decay", 0.0), ("eps", 1e-10), ("weight_decay", 0.0), ("initial_accumulator_value", 0.0),
         ("maximize", False)), 5,
    ),
    "RMSprop": (
        "RMSprop",
        (("lr", 0.1), ("momentum", 0.0), ("alpha", 0.99), ("eps", 1e-8), ("centered", False), ("weight_decay", 0.0),
         ("maximize", False)), 5,
    ),
}  # fmt: skip
"""Name → class, hyper-parameters, and how many arrays of the model's size it reads or writes."""

TARGETS = {"SGD": "≥ 0.7", "SGD, momentum": "≥ 0.7", "Adam": "≥ 0.7", "AdamW": "≥ 0.7"}


def make_contenders(shards: tuple[Shard, ...], names: list[str]) -> list[InProcess]:
    """A plain copy of all shards, and each optimizer."""
    import torch

    from ps.optim.apply import ShardOptimizer

    torch.set_num_threads(1)
    grads = [torch.full((shard.numel,), 1e-3) for shard in shards]
    target = [torch.empty(shard.numel) for shard in shards]
    nbytes = sum(shard.nbytes for shard in shards)

    def copy() -> None:
        for to, source in zip(target, grads, strict=True):
            to.copy_(source)

    def optimizer(name: str) -> InProcess:
        kind, hyper, arrays = OPTIMIZERS[name]
        applied = [ShardOptimizer(shard, served(kind), torch.zeros(shard.numel), exact=False) for shard in shards]
        present = [bytes([0xFF] * (len(s.pieces) >> 3)) + _rest(len(s.pieces) & 7) for s in shards]

        def step() -> None:
            for shard, grad, bits in zip(applied, grads, present, strict=True):
                shard.apply(grad, bits, hyper)

        return InProcess(name, step, arrays * nbytes)

    return [InProcess(COPY, copy, 2 * nbytes), *(optimizer(name) for name in names)]


def _rest(bits: int) -> bytes:
    return bytes([(1 << bits) - 1]) if bits else b""


def main() -> None:
    """Parse, measure, report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mb", type=float, default=100, help="size of the model in 1e6 bytes")
    parser.add_argument("--tensors", type=int, default=60)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    memory.restart_with_settings(os.environ)
    each = max(1, int(options.mb * 1e6 / 4 / options.tensors))
    params = tuple(ParamSpec(name=f"p{i}", shape=(each,), dtype="float32", group=0) for i in range(options.tensors))
    plan = make_plan(ModelSignature(params=params, optimizer="SGD"))
    names = list(TARGETS) if options.quick else list(OPTIMIZERS)
    rounds, turn_s = (5, 0.2) if options.quick else (options.rounds, 0.5)
    turns = alternate(make_contenders(plan.shards, names), rounds=rounds, turn_s=turn_s)
    report = Report(
        name=f"server_apply-{options.mb:g}mb-{options.tensors}t" + "-quick" * options.quick,
        title=f"Optimizers on the server: {options.mb:g} MB in {len(plan.shards)} shards, one thread",
        config={key: str(value) for key, value in vars(options).items()},
        environment=environment({name: os.environ.get(name, "") for name in (memory.HUGE_PAGES, memory.TUNABLES)}),
        columns=("what", "ms per push of the whole model", "GB/s read and written", "share of a copy's rate"),
        samples=turns.samples,
    )
    for name in turns.samples:
        share = turns.ratio(name, COPY, lambda sample: sample.bytes_per_s)
        report.rows.append((name, str(turns.step_s(name).scaled(1e3)), str(_gb(turns.goodput(name))), str(share)))
        report.medians[name] = turns.goodput(name).median
        if name in TARGETS:
            report.add_ratio(f"{name} over copy", share, TARGETS[name])
    report.write(options.json)


def _gb(stats: Stats) -> Stats:
    return stats.scaled(1e-9)


if __name__ == "__main__":
    main()
