"""How goodput and the servers' cost grow: 1 to 8 workers on 1 to 4 servers, and models of few and of many tensors.

    python benchmarks/scaling.py --mb 10 --json result.json

Goodput is of all workers together, and so is server CPU per byte. All processes share this machine's cores, so goodput
stops growing when those are used up; CPU per byte is what says how a job would grow on more hosts.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import contenders
from contenders import Model, Shape
from harness import Report, Turns, alternate, environment
from links import Link
from processes import ALLOCATIONS, Children, settings

SHAPES = ((1, 1), (2, 1), (4, 1), (8, 1), (1, 2), (2, 2), (4, 2), (4, 4), (8, 4))
"""Workers, servers."""

QUICK_SHAPES = ((1, 1), (2, 1), (2, 2))

TENSORS = (1, 60, 1000)
"""Tensors in the model, with one worker and one server."""

USUAL_TENSORS = 60


def main() -> None:
    """Parse, measure, report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mb", type=float, default=10, help="size of the model in 1e6 bytes")
    parser.add_argument("--allocation", choices=ALLOCATIONS, default="tuned")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    with Children(settings(options.allocation)) as children, Link("loopback") as link:
        groups = []
        for name, model, shape in _cases(options):
            groups.append(contenders.ours(children, link, model, shape, name))
            groups[-1].wait_ready()  # one after the other: starting is the heaviest part
        turns = alternate(groups, rounds=options.rounds, turn_s=0.3 if options.quick else 1.0)
        report = Report(
            name=f"scaling-{options.mb:g}mb" + "-quick" * options.quick,
            title=f"Scaling: {options.mb:g} MB, loopback",
            config={key: str(value) for key, value in vars(options).items()},
            environment=environment(children.settings),
            columns=(
                "workers × servers, tensors",
                "goodput MB/s, all workers",
                "server CPU s per GB",
                "all CPU s per GB",
            ),
            samples=turns.samples,
        )
    _fill(report, turns)
    report.write(options.json)


def _name(workers: int, servers: int, tensors: int) -> str:
    return f"{workers} × {servers}, {tensors}"


def _cases(options: argparse.Namespace) -> list[tuple[str, Model, Shape]]:
    cases = [(workers, servers, USUAL_TENSORS) for workers, servers in (QUICK_SHAPES if options.quick else SHAPES)]
    if not options.quick:
        cases += [(1, 1, tensors) for tensors in TENSORS if tensors != USUAL_TENSORS]
    return [(_name(*case), Model(options.mb, case[2]), Shape(workers=case[0], servers=case[1])) for case in cases]


def _fill(report: Report, turns: Turns) -> None:
    first = next(iter(turns.samples))
    for name in turns.samples:
        server = turns.stats(name, lambda sample: sample.server_cpu_s / sample.bytes_moved * 1e9)
        everybody = turns.stats(name, lambda sample: sample.cpu_s / sample.bytes_moved * 1e9)
        report.rows.append((name, str(turns.goodput(name).scaled(1e-6)), str(server), str(everybody)))
        report.medians[name] = turns.goodput(name).median
        if name != first:
            report.add_ratio(f"{name} over {first}", turns.ratio(name, first, lambda sample: sample.bytes_per_s))


if __name__ == "__main__":
    main()
