"""The method of every benchmark: contenders take turns, ratios are formed within a turn, everything is written down.

A machine's speed drifts and other work comes and goes, so absolute numbers of two runs can't be compared. Here all
contenders of a benchmark live at the same time and run in short alternations, in rotating order; a ratio is formed
pair by pair within each alternation, and its median, minimum and maximum are reported.
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Protocol

RESULTS = Path(__file__).parent / "results"

LEAST_ROUNDS = 5
"""Fewest alternations of a reported number."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One alternation of one contender."""

    steps: int
    seconds: float
    bytes_moved: int
    """Pushed plus pulled, all workers together; 0 where bytes are not the point."""
    cpu_s: float
    """Processor seconds of all its processes."""
    crossed_bytes: int
    """Growth of the link's byte counters."""
    other_cores: float
    """Cores that everybody else on the machine kept busy meanwhile."""
    server_cpu_s: float = 0.0
    """Processor seconds of its servers alone, where it has any."""

    @property
    def step_s(self) -> float:
        """Mean time of a step."""
        return self.seconds / self.steps

    @property
    def bytes_per_s(self) -> float:
        """Goodput, both directions together."""
        return self.bytes_moved / self.seconds


class Contender(Protocol):
    """Something that can take steps; its processes run already."""

    name: str

    def run(self, steps: int) -> Sample:
        """Take `steps` steps."""
        ...

    def check(self) -> None:
        """Raise unless its weights are what all its steps must have led to."""
        ...


@dataclass(frozen=True, slots=True)
class Stats:
    """Median and extremes over alternations."""

    median: float
    least: float
    most: float
    count: int

    @classmethod
    def of(cls, values: Sequence[float]) -> Stats:
        """The statistics of some values."""
        return cls(statistics.median(values), min(values), max(values), len(values))

    def scaled(self, factor: float) -> Stats:
        """In another unit."""
        return Stats(self.median * factor, self.least * factor, self.most * factor, self.count)

    def __str__(self) -> str:
        return f"{self.median:.4g} ({self.least:.4g} – {self.most:.4g})"


@dataclass(slots=True)
class Turns:
    """Samples of all contenders; the n-th of each belong to the same alternation."""

    samples: dict[str, list[Sample]] = field(default_factory=dict)

    def stats(self, name: str, value: Callable[[Sample], float]) -> Stats:
        """Statistics of one contender's samples."""
        return Stats.of([value(sample) for sample in self.samples[name]])

    def goodput(self, name: str) -> Stats:
        """Bytes per second, both directions together."""
        return self.stats(name, lambda sample: sample.bytes_per_s)

    def step_s(self, name: str) -> Stats:
        """Seconds per step."""
        return self.stats(name, lambda sample: sample.step_s)

    def ratio(self, name: str, other: str, value: Callable[[Sample], float] = lambda s: 1 / s.step_s) -> Stats:
        """`name` over `other`, alternation by alternation; by default how many times as fast its steps are."""
        pairs = zip(self.samples[name], self.samples[other], strict=True)
        return Stats.of([value(mine) / value(theirs) for mine, theirs in pairs])

    def best_of(self, names: Sequence[str]) -> str:
        """The contender with the shortest median step."""
        return min(names, key=lambda name: self.step_s(name).median)


def alternate(
    contenders: Sequence[Contender],
    *,
    rounds: int = LEAST_ROUNDS,
    turn_s: float = 0.5,
    most_steps: int = 2000,
    progress: Callable[[str], object] = lambda text: sys.stderr.write(text + "\n"),
) -> Turns:
    """Let contenders take turns of about `turn_s` seconds, after a warm-up, and check each one's result at the end."""
    steps = {contender.name: _warm_up(contender, turn_s, most_steps) for contender in contenders}
    turns = Turns({contender.name: [] for contender in contenders})
    for number in range(rounds):
        first = number % len(contenders)
        for contender in (*contenders[first:], *contenders[:first]):
            sample = contender.run(steps[contender.name])
            turns.samples[contender.name].append(sample)
        progress(f"alternation {number + 1} of {rounds}: " + _line(turns))
    for contender in contenders:
        contender.check()
    return turns


def _warm_up(contender: Contender, turn_s: float, most_steps: int) -> int:
    """Take a few steps; returns how many make a turn."""
    first_s = contender.run(1).step_s
    step_s = contender.run(1 if first_s > turn_s else 2).step_s
    return max(1, min(most_steps, round(turn_s / step_s)))


def _line(turns: Turns) -> str:
    return ", ".join(f"{name} {samples[-1].step_s * 1e3:.4g} ms" for name, samples in turns.samples.items())


def busy_s() -> float:
    """Seconds that all cores of the machine have been busy since it started."""
    fields = [int(field) for field in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
    return (sum(fields) - fields[3] - fields[4]) / os.sysconf("SC_CLK_TCK")


def environment(settings: Mapping[str, str]) -> dict[str, object]:
    """What a number can't be read without."""
    memory_kb = next(line for line in Path("/proc/meminfo").read_text().splitlines() if line.startswith("MemTotal"))
    return {
        "date": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "cpu": _cpu(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(int(memory_kb.split()[1]) / 2**20, 1),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "versions": {name: _version(name) for name in ("torch", "grpcio", "numpy")},
        "commit": _commit(),
        "huge_pages": _read("/sys/kernel/mm/transparent_hugepage/enabled"),
        "load": [round(load, 2) for load in os.getloadavg()],
        "settings": dict(settings),
    }


def _cpu() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown")


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "not installed"


def _commit() -> str:
    command = ["git", "-C", str(RESULTS.parent), "describe", "--always", "--dirty"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    except OSError:
        return "unknown"
    return done.stdout.strip() or "unknown"


def _read(path: str) -> str:
    try:
        return Path(path).read_text().strip()
    except OSError:
        return "unknown"


@dataclass(slots=True)
class Report:
    """One benchmark's results, as JSON and as a Markdown table."""

    name: str
    """Names its files, e.g. `push_pull-100mb-loopback`."""
    title: str
    config: dict[str, object]
    environment: dict[str, object]
    columns: tuple[str, ...]
    rows: list[tuple[str, ...]] = field(default_factory=list)
    ratios: dict[str, float | None] = field(default_factory=dict)
    """Medians under fixed names; None = could not be measured here."""
    spreads: dict[str, Stats] = field(default_factory=dict)
    """The same ratios with their extremes."""
    targets: dict[str, str] = field(default_factory=dict)
    """What each ratio should be."""
    medians: dict[str, float] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    samples: dict[str, list[Sample]] = field(default_factory=dict)

    def add_ratio(self, name: str, ratio: Stats, target: str = "") -> None:
        """Put down a ratio."""
        self.ratios[name] = round(ratio.median, 4)
        self.spreads[name] = ratio
        if target:
            self.targets[name] = target

    def as_json(self) -> dict[str, object]:
        """Everything."""
        return asdict(self)

    def markdown(self) -> str:
        """For people."""
        lines = [f"## {self.title}", "", *_table(self.columns, self.rows)]
        if self.ratios:
            shown = [
                (name, str(self.spreads.get(name, value)), self.targets.get(name, ""))
                for name, value in self.ratios.items()
            ]
            lines += ["", *_table(("ratio", "median (least – most)", "target"), shown)]
        lines += ["", *(f"- {note}" for note in self.notes), f"- {self._where()}", ""]
        return "\n".join(lines)

    def _where(self) -> str:
        at = self.environment
        others = Stats.of([sample.other_cores for samples in self.samples.values() for sample in samples] or [0.0])
        return (
            f"{at['date']}, {at['cores']} cores of {at['cpu']}, kernel {at['kernel']}, {at['versions']}, commit "
            f"{at['commit']}; cores kept busy by others meanwhile: {others}; settings {at['settings']}"
        )

    def write(self, json_file: Path | None = None) -> None:
        """Print the table; write both forms to `results/<date>/`, and the JSON to `json_file` too."""
        text = json.dumps(self.as_json(), indent=1) + "\n"
        folder = RESULTS / time.strftime("%Y-%m-%d")
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{self.name}.json").write_text(text)
        (folder / f"{self.name}.md").write_text(self.markdown())
        if json_file is not None:
            json_file.write_text(text)
        sys.stdout.write(self.markdown() + "\n")
        sys.stdout.flush()


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    return [_row(columns), _row(["---"] * len(columns)), *map(_row, rows)]


def _row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cells) + " |"
