"""Step time of a real model against the larger of its compute and its communication, for each mode of overlap.

    python benchmarks/overlap.py --link 200mbit --json result.json

The amount of compute is chosen so that it takes about as long as the communication: there overlap matters most, and
without it a step takes twice the larger one. Compute alone, communication alone and the whole step take turns.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import contenders
from contenders import Group, Shape
from harness import Report, Sample, Turns, alternate, environment
from links import LINKS, Link
from processes import ALLOCATIONS, Children, settings

MODES = {"none": "", "step": "≤ 1.15", "backward": "≤ 1.4"}
"""Modes of overlap and their targets."""

KINDS = ("compute", "exchange", "train")


class Kind:
    """One kind of step of one job, as a contender."""

    def __init__(self, mode: str, kind: str, job: Group) -> None:
        self.name = f"{mode}: {kind}"
        self._kind = kind
        self._job = job

    def run(self, steps: int) -> Sample:
        """See `Contender.run`."""
        return self._job.run(steps, kind=self._kind)

    def check(self) -> None:
        """Nothing: the gradients are not constant, and golden tests compare the results."""


def main() -> None:
    """Parse, measure, report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--link", choices=LINKS, default="200mbit")
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--depth", type=int, default=8)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--allocation", choices=ALLOCATIONS, default="tuned")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    nbytes = 4 * options.depth * (options.width + 1) * options.width
    with Children(settings(options.allocation)) as children, Link(options.link) as link:
        jobs = _jobs(children, link, options, nbytes)
        kinds = [Kind(mode, kind, job) for mode, job in jobs.items() for kind in KINDS]
        turns = alternate(kinds, rounds=options.rounds, turn_s=0.5 if options.quick else 1.0)
        report = Report(
            name=f"overlap-{link.name}" + "-quick" * options.quick,
            title=f"Overlap: a model of {nbytes / 1e6:.1f} MB, {link.name}",
            config={key: str(value) for key, value in vars(options).items()},
            environment=environment(children.settings),
            columns=("mode", "compute ms", "communication ms", "step ms", "step / larger of the two"),
            samples=turns.samples,
        )
    report.notes += [f"overlap={mode} is not built yet" for mode in MODES if mode not in jobs]
    for mode in jobs:
        _fill(report, turns, mode)
    report.write(options.json)


def _jobs(children: Children, link: Link, options: argparse.Namespace, nbytes: int) -> dict[str, Group]:
    """A job for each mode that there is, with compute set to take as long as communication."""
    jobs: dict[str, Group] = {}
    flags = ["--width", options.width, "--depth", options.depth, "--batch", options.batch]
    for mode in MODES:
        job = contenders.job(children, link, Shape(), nbytes, mode, "trainer", [*flags, "--overlap", mode])
        if job.actors[0].answer()["ready"] is True:
            jobs[mode] = job
    first = jobs["none"]
    first.run(1, kind="compute")
    first.run(1, kind="exchange")
    micro_batches = max(1, round(first.run(3, kind="exchange").step_s / first.run(3, kind="compute").step_s))
    for job in jobs.values():
        job.actors[0].tell(set=micro_batches)
        job.actors[0].answer()
    return jobs


def _fill(report: Report, turns: Turns, mode: str) -> None:
    compute, exchange, train = (f"{mode}: {kind}" for kind in KINDS)
    larger = max((compute, exchange), key=lambda name: turns.step_s(name).median)
    ratio = turns.ratio(train, larger, lambda sample: sample.step_s)
    times = [str(turns.step_s(name).scaled(1e3)) for name in (compute, exchange, train)]
    report.rows.append((mode, *times, str(ratio)))
    report.add_ratio(f"{mode}: step over max(compute, communication)", ratio, MODES[mode])


if __name__ == "__main__":
    main()
