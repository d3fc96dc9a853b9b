"""What came out of a run of these tests, as a matrix: a pytest plugin that gathers it, and its two ways of printing.

The golden tests record how far each case was from plain PyTorch, the refusals their errors; of all others the first
line of the docstring says what they prove.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from rich import box
from rich.console import Console
from rich.table import Table

from tests.numerics.cases import CASES, Case
from tests.numerics.refused import REFUSED

FILE = Path(__file__).with_name("MATRIX.md")

FAILED = "FAILED"

INTRO = """\
# What equals plain PyTorch

Results of a run of `make matrix`, which writes this file; the README says it in words. Every case is trained by one
worker through servers, and by plain PyTorch, with the same seed. *equal*: the weights on the servers have the same
bits. A number: the largest |difference| / (1 + |weight|). *exact* and *fused* are the servers' kernels (`--exact` or
the default); the number behind them is that of servers. With three servers tensors are cut into about ten shards, and
steps into several messages. *RPC*: a process each for coordinator, servers and worker; all other columns are in one
process, with the same code but for gRPC and torch RPC. Fused kernels may differ by a few last places of the coarsest
dtype: 1e-6 in float32, 1e-14 in float64, 2e-3 in float16, 1e-2 in bfloat16.
"""

COLUMNS = ("exact, 1", "exact, 3", "fused, 3", "RPC")


@dataclass
class Grid:
    """A table: a title, a head, and rows of text."""

    title: str
    head: Sequence[str]
    rows: list[list[str]]

    def markdown(self) -> str:
        """As a section of a Markdown file."""
        lines = [self.head, ["---"] * len(self.head), *self.rows]
        cells = ("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)
        return "\n".join([f"## {self.title}", "", *cells, ""])

    def print(self, console: Console) -> None:
        """As wide as the terminal is."""
        table = Table(*self.head, title=self.title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
        for row in self.rows:
            table.add_row(*row, style="red" if FAILED in row else None)
        console.print(table, markup=False)


class Matrix:
    """The plugin. Ask for its text after the run."""

    def __init__(self) -> None:
        self._cells: dict[tuple[str, str], list[str]] = {}
        self._errors: dict[str, str] = {}
        self._docs: dict[str, str] = {}
        self._others: dict[str, Counter[str]] = {}

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Remember what each test function proves."""
        for item in items:
            doc = getattr(getattr(item, "function", None), "__doc__", None) or ""
            self._docs[_function(item.nodeid)] = " ".join(doc.split())

    def pytest_deselected(self, items: Sequence[pytest.Item]) -> None:
        """Slow ones are listed all the same."""
        for item in items:
            self._others.setdefault(_function(item.nodeid), Counter())["left out"] += 1

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Take in what a test recorded."""
        if report.when != "call" and report.passed:
            return
        recorded: dict[str, Any] = dict(report.user_properties)
        if "golden" in recorded:
            self._golden(*recorded["golden"], passed=report.passed)
        elif "refused" in recorded:
            name, text = recorded["refused"]
            self._errors[name] = text if report.passed else FAILED
        else:
            self._others.setdefault(_function(report.nodeid), Counter())[report.outcome] += 1

    def _golden(self, name: str, column: str, found: float, *, passed: bool) -> None:
        text = ("equal" if found == 0 else f"{found:.0e}") if passed else FAILED
        way, _, servers = column.partition(", ")
        if way.startswith("RPC"):
            kernels = way.removeprefix("RPC").strip()
            text, column = " ".join(filter(None, (kernels, text, f"({servers})"))), "RPC"
        self._cells.setdefault((name, column), []).append(text)

    @property
    def complete(self) -> bool:
        """Whether every case was run in process, everything refused was tried, and nothing failed."""
        cells = all((name, column) in self._cells for name in CASES for column in COLUMNS[:-1])
        failed = FAILED in str(self._cells) or FAILED in self._errors.values()
        return cells and not failed and self._errors.keys() == REFUSED.keys()

    def grids(self) -> Iterator[Grid]:
        """The tables, of what was run."""
        ran = {name for name, _ in self._cells}
        cases = {name: case for name, case in CASES.items() if name in ran}
        rows = [[name, *described(case), *self._row(name), declared(case)] for name, case in cases.items()]
        yield Grid("Cases", ("Case", "Model", "Optimizer", *COLUMNS, "Declared"), rows)
        yield Grid(
            "Refused", ("What", "Error"), [[name, self._errors[name]] for name in REFUSED if name in self._errors]
        )
        others = [[_short(name), self._docs[name], _counts(count)] for name, count in sorted(self._others.items())]
        yield Grid("Other facts about numbers", ("Test", "Proves", "Run"), others)

    def _row(self, name: str) -> list[str]:
        return [", ".join(self._cells.get((name, column), [])) for column in COLUMNS]

    def markdown(self) -> str:
        """The text of `MATRIX.md`."""
        made = f"Made with torch {torch.__version__} on the CPU.\n"
        return "\n".join([INTRO, made, *(grid.markdown() for grid in self.grids())])

    def print(self) -> None:
        """To the terminal."""
        console = Console(width=None if Console().is_terminal else 200)
        for grid in self.grids():
            grid.print(console)


def declared(case: Case) -> str:
    """What the table of cases says."""
    return f"within {case.bound:g}: {case.because}" if case.bound else "equal"


def described(case: Case) -> tuple[str, str]:
    """Model, with its dtypes unless float32, and optimizer, by name."""
    kind = case.model.func if isinstance(case.model, partial) else case.model
    model = case.model()
    optimizer = type(case.optimizer(model)).__name__
    dtypes = ", ".join(dict.fromkeys(str(param.dtype).removeprefix("torch.") for param in model.parameters()))
    return (kind.__name__ if dtypes == "float32" else f"{kind.__name__}: {dtypes}"), optimizer


def _function(nodeid: str) -> str:
    return nodeid.partition("[")[0]


def _short(function: str) -> str:
    path, _, name = function.partition("::")
    return f"{Path(path).stem.removeprefix('test_')}: {name.removeprefix('test_').replace('_', ' ')}"


def _counts(count: Counter[str]) -> str:
    return ", ".join(f"{number} {outcome}" for outcome, number in sorted(count.items()))
