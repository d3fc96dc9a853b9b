"""MATRIX.md names what the tables hold; what came out of it is the matter of the runs that write it."""

from __future__ import annotations

import re

from tests.numerics.cases import CASES
from tests.numerics.matrix import COLUMNS, FAILED, FILE, declared
from tests.numerics.refused import REFUSED
from tests.support.cluster import ROOT

REPAIR = "run `make matrix`"


def rows(title: str) -> list[list[str]]:
    """The rows of one table of the file, without its head."""
    section = FILE.read_text().partition(f"\n## {title}\n")[2].partition("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("| ")]
    return [re.split(r" (?<!\\)\| ", line.removeprefix("| ").removesuffix(" |")) for line in lines[2:]]


def test_it_names_exactly_the_cases_and_what_they_declare() -> None:
    """In the table's order; and each was run with one server and with three, exact and fused."""
    found = rows("Cases")
    assert [row[0] for row in found] == list(CASES), REPAIR
    for row in found:
        assert row[-1] == declared(CASES[row[0]]), REPAIR
        cells = row[3 : 3 + len(COLUMNS)]
        assert FAILED not in row and all(cells[:-1]), REPAIR
        assert CASES[row[0]].bound or all(cell == "equal" for cell in cells[:2]), REPAIR


def test_it_names_exactly_what_is_refused() -> None:
    """With the words that the tests ask for."""
    found = dict(row for row in rows("Refused"))
    assert list(found) == list(REFUSED), REPAIR
    assert [name for name, text in found.items() if REFUSED[name].words not in text] == [], REPAIR


def test_the_other_tests_that_it_names_are_there() -> None:
    """None was renamed or taken away since."""
    functions = {
        f"{path.stem.removeprefix('test_')}: {name.replace('_', ' ')}"
        for path in (ROOT / "tests" / "numerics").glob("test_*.py")
        for name in re.findall(r"^def test_(\w+)", path.read_text(), re.MULTILINE)
    }
    named = {row[0] for row in rows("Other facts about numbers")}
    assert named and named <= functions, REPAIR
