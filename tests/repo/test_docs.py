"""What the documents say is so: their code runs, their command lines and names exist, their links lead somewhere."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from enum import Enum
from pathlib import Path

import pytest

from ps.rpc.wire import Status
from ps.types import JobState, LeaveReason, MemberState, Part, Role
from tests.repo.test_names import FLAGS
from tests.support.commands import parse

ROOT = Path(__file__).parents[2]
GLOSSARY = ROOT / "ps" / "GLOSSARY.md"
ALL_FLAGS = {flag for flags in FLAGS.values() for flag in flags.split()} | {"--help"}
DOCUMENTS = sorted(
    path
    for folder in (".", "ps", "workers", "deploy", "tests", "proto", "benchmarks", "examples")
    for path in (ROOT / folder).glob("*.md")
    if path.name != "CHANGELOG.md"  # tells of names that have gone
)
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
ADDRESS = "10.0.0.1:7777"


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def blocks(path: Path, *languages: str) -> list[str]:
    """The fenced blocks of a document in these languages; "" = none is named."""
    return [text for language, text in BLOCK.findall(path.read_text()) if language in languages]


def inline(path: Path) -> list[str]:
    """The code between single backticks."""
    return re.findall(r"`([^`\n]+)`", BLOCK.sub("", path.read_text()))


def calls(path: Path) -> Iterator[list[str]]:
    """Every call of psctl in a document: in lines of its blocks, and in running text, where it has arguments."""
    lines = [line for text in blocks(path, "", "sh", "bash") for line in text.replace("\\\n", "").splitlines()]
    for line in [*lines, *(code for code in inline(path) if code.startswith("psctl ") and len(code.split()) > 2)]:
        if "psctl" not in line or "COMMAND" in line or "[" in line:
            continue
        words = shlex.split(line, comments=True)
        if "psctl" in words:
            yield [re.sub(r"^(H:P|HOST:PORT)$", ADDRESS, word) for word in words[words.index("psctl") + 1 :]]


def test_python_blocks_run() -> None:
    """Each block of Python in a document runs as it stands, without a coordinator, and trains its model."""
    pieces = {
        f"{name_of(path)} block {number}": text
        for path in DOCUMENTS
        for number, text in enumerate(blocks(path, "python"), start=1)
    }
    assert len(pieces) >= 6
    group = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    env = {key: value for key, value in os.environ.items() if not key.startswith("PS_")} | group
    command = [sys.executable, "-m", "tests.support.blocks"]
    done = subprocess.run(
        command, input=json.dumps(pieces), env=env, cwd=ROOT, capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stderr
    failed = "\n".join(f"{name}: {trouble}" for name, trouble in json.loads(done.stdout).items() if trouble)
    assert not failed, failed


@pytest.mark.parametrize("path", DOCUMENTS, ids=name_of)
def test_calls_of_psctl(path: Path) -> None:
    """psctl takes every command line that a document shows."""
    for arguments in calls(path):
        parse(arguments, {"PS_COORDINATOR": ADDRESS})


def test_calls_are_found() -> None:
    """The search for command lines sees those of the README: in blocks, with comments, and in other commands."""
    found = list(calls(ROOT / "README.md"))
    assert {"coordinator", "server", "worker", "status", "export", "plan"} <= {arguments[0] for arguments in found}
    assert [arguments[0] for arguments in calls(ROOT / "deploy" / "README.md")].count("status") == 2


@pytest.mark.parametrize("path", DOCUMENTS, ids=name_of)
def test_names_exist(path: Path) -> None:
    """Commands, flags, variables and make targets that a document names exist."""
    code = inline(path)
    commands = {words[1] for words in map(str.split, code) if words[:1] == ["psctl"] and len(words) > 1}
    assert commands - {"COMMAND", "--help"} <= FLAGS.keys()
    flags = {found[0] for text in code if (found := re.match(r"--[a-z][a-z-]*", text))}
    assert path.parent.name == "benchmarks" or flags - {"--network"} <= ALL_FLAGS  # scripts' own, and docker's
    targets = set(re.findall(r"^([a-z-]+):.*## ", (ROOT / "Makefile").read_text(), re.MULTILINE))
    lines = [*code, *"\n".join(blocks(path, "", "sh", "bash")).splitlines()]
    made = {word for line in lines if (found := re.match(r"make ((?:[a-z-]+ ?)+)", line)) for word in found[1].split()}
    assert made <= targets


@pytest.mark.parametrize("path", DOCUMENTS, ids=name_of)
def test_variables_exist(path: Path) -> None:
    """Each PS_ variable that a document names is read by the code, or by a file of deploy/."""
    sources = [p for folder in ("ps", "workers", "deploy", "benchmarks", "tests") for p in (ROOT / folder).rglob("*")]
    text = "".join(p.read_text() for p in sources if p.suffix in {".py", ".service", ".sbatch", ".sh"})
    assert set(re.findall(r"\bPS_[A-Z_]+\b", path.read_text())) <= set(re.findall(r"\bPS_[A-Z_]+\b", text))


@pytest.mark.parametrize("path", DOCUMENTS, ids=name_of)
def test_links_lead_somewhere(path: Path) -> None:
    """Each link of a document to a file of this repository leads to one."""
    targets = [target.partition("#")[0] for target in re.findall(r"\]\(([^)\s]+)\)", path.read_text())]
    assert [t for t in targets if t and "://" not in t and not (path.parent / t).exists()] == []


def test_glossary_is_sorted() -> None:
    """Words are in the order of the alphabet, each once for each meaning; the words of the house are there."""
    entries = re.findall(r"^\*\*([^*]+)\*\*( \([^)]*\))?: ", GLOSSARY.read_text(), re.MULTILINE)
    assert entries == sorted(set(entries))
    words = {word for word, _ in entries}
    assert {"push", "pull", "shard", "version", "step", "clock", "staleness", "lease", "epoch", "incarnation"} <= words
    assert {"coordinator", "server", "worker", "observer", "consistency", "asp", "ssp", "bsp"} <= words


@pytest.mark.parametrize(
    ("head", "states"),
    [
        ("role", Role),
        ("member state", MemberState),
        ("leave reason", LeaveReason),
        ("job state", JobState),
        ("part (of a worker in clocks and rounds)", Part),
        ("status (of a shard in an answer)", Status),
    ],
)
def test_glossary_names_every_state(head: str, states: type[Enum]) -> None:
    """The tables of states are the code's own, in its order."""
    found = re.search(
        rf"^\| {re.escape(head)} \| \|\n\| --- \| --- \|\n((?:\|.*\n)+)", GLOSSARY.read_text(), re.MULTILINE
    )
    assert found is not None
    rows = re.findall(r"^\| `(\w+)` \|", found[1], re.MULTILINE)
    assert rows == [state.name.lower() if states is Status else state.value for state in states]
