"""A small model's step against the least that a step could cost: one bare Python RPC round trip.

    python benchmarks/small_model.py --json result.json

The model is 1 MB in 60 tensors. `one empty RPC` carries nothing, `one RPC with the bytes` carries the model as one flat
tensor there and back and does nothing with it. Both are torch RPC alone, on the same transports.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import contenders
from contenders import DDP_TENSORS, OURS, RPC_BULK, RPC_EACH, Group, Model, Shape, same_host
from harness import Report, Turns, alternate, environment
from links import Link
from processes import ALLOCATIONS, Children, settings

EMPTY = "one empty RPC"
BYTES = "one RPC with the bytes"
TWO = f"{OURS}, 2 servers"


def main() -> None:
    """Parse, measure, report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mb", type=float, default=1.0, help="size of the model in 1e6 bytes")
    parser.add_argument("--tensors", type=int, default=60)
    parser.add_argument("--allocation", choices=ALLOCATIONS, default="tuned")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    model = Model(options.mb, options.tensors)
    with Children(settings(options.allocation)) as children, Link("loopback") as link:
        groups = _groups(children, link, model, quick=options.quick)
        for group in groups:
            group.wait_ready()
        turns = alternate(groups, rounds=5 if options.quick else options.rounds, turn_s=0.3)
        report = Report(
            name=f"small_model-{options.mb:g}mb-{options.tensors}t-{options.allocation}" + "-quick" * options.quick,
            title=f"Small model: {options.mb:g} MB in {options.tensors} tensors, loopback",
            config={key: str(value) for key, value in vars(options).items()},
            environment=environment(children.settings),
            columns=("who", "ms per step", "CPU ms per step"),
            samples=turns.samples,
        )
    _fill(report, turns)
    report.write(options.json)


def _groups(children: Children, link: Link, model: Model, *, quick: bool) -> list[Group]:
    shape = Shape()
    groups = [
        contenders.ours(children, link, model, shape),
        contenders.torch_rpc(children, link, model, "empty", EMPTY),
        contenders.torch_rpc(children, link, model, "echo", BYTES),
    ]
    if not quick:
        on = contenders.SAME_HOST
        groups += [
            contenders.ours(children, link, model, shape.on_same_host(), same_host(OURS)),
            contenders.ours(children, link, model, Shape(servers=2), TWO),
            contenders.torch_rpc(children, link, model, "empty", same_host(EMPTY), on),
            contenders.torch_rpc(children, link, model, "bulk", RPC_BULK),
            contenders.torch_rpc(children, link, model, "per_parameter", RPC_EACH),
            contenders.gloo(children, link, model, "ddp", DDP_TENSORS),
        ]
    return groups


def _fill(report: Report, turns: Turns) -> None:
    for name in turns.samples:
        cpu = turns.stats(name, lambda sample: sample.cpu_s / sample.steps * 1e3)
        report.rows.append((name, str(turns.step_s(name).scaled(1e3)), str(cpu)))
        report.medians[name] = turns.step_s(name).median
    report.add_ratio("step_over_empty_rpc", turns.ratio(OURS, EMPTY, lambda sample: sample.step_s), "≤ 1.5")
    report.add_ratio("step_over_rpc_with_bytes", turns.ratio(OURS, BYTES, lambda sample: sample.step_s))
    for name, other in ((same_host(OURS), same_host(EMPTY)), (TWO, OURS)):
        if name in turns.samples:
            report.add_ratio(f"{name} / {other}", turns.ratio(name, other, lambda sample: sample.step_s))


if __name__ == "__main__":
    main()
