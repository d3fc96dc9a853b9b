"""Names that people and scripts rely on: public Python names, commands, flags, make targets, pinned versions."""

from __future__ import annotations

import argparse
import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import workers
from workers.cli import build_parser

ROOT = Path(__file__).parents[2]

FLAGS = {
    "local": "--consistency --exact --run-dir --servers --shard-bytes --workers",
    "worker": "--advertise --coordinator --error-file --interface --join-timeout-s --name",
    "coordinator": "--address-file --channels --consistency --exact --heartbeat-s --hold --host --lease-s "
    "--lost-coordinator-s --max-members --min-workers --no-workers-s --port --servers --shard-bytes --state "
    "--summary-file --transports",
    "server": "--advertise --apply-threads --coordinator --interface --join-timeout-s --name --rpc-threads --snapshots",
    "status": "--coordinator --json --timeout-s",
    "plan": "--json --model --optimizer --servers --shard-bytes",
    "export": "--advertise --coordinator --interface --join-timeout-s --name --output",
}


def subcommands() -> dict[str, argparse.ArgumentParser]:
    """The commands of `psctl` by name."""
    action = next(a for a in build_parser()._actions if isinstance(a, argparse._SubParsersAction))
    return dict(action.choices)


def test_public_names() -> None:
    """`workers` offers exactly these; each can be had."""
    assert workers.__all__ == ["Epoch", "Worker", "WorkerDrained", "WorkerStopped", "join", "permutation"]
    for name in workers.__all__:
        assert getattr(workers, name) is not None


def test_commands_and_flags() -> None:
    """`psctl` has these commands with these flags: a change here is a change for users."""
    found = {
        name: " ".join(
            sorted(flag for flag in parser._option_string_actions if flag.startswith("--") and flag != "--help")
        )
        for name, parser in subcommands().items()
    }
    assert found == FLAGS


@pytest.mark.parametrize("command", sorted(FLAGS))
def test_every_flag_has_help(command: str) -> None:
    """The help of each command says what it does and what each flag means."""
    parser = subcommands()[command]
    assert parser.description and len(parser.description) > 30
    assert [action.dest for action in parser._actions if not action.help] == []
    assert command in parser.format_usage()


def test_make_targets() -> None:
    """The tasks that README, CONTRIBUTING and CI name."""
    makefile = (ROOT / "Makefile").read_text()
    targets = set(re.findall(r"^([a-z-]+):.*## ", makefile, re.MULTILINE))
    assert {"setup", "run", "test", "test-all", "fmt", "lint", "types", "proto", "bench"} <= targets
    assert "make test" in (ROOT / ".ci" / "run").read_text()


def test_lock_file_pins_every_dependency() -> None:
    """requirements.lock pins each dependency of pyproject.toml, exactly and within its bounds."""
    pins = {}
    for line in (ROOT / "requirements.lock").read_text().splitlines():
        if line and not line.startswith("#"):
            name, exact, version = line.partition("==")
            assert exact and version, line
            pins[canonicalize_name(name)] = version
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = [*project["dependencies"], *(r for extra in project["optional-dependencies"].values() for r in extra)]
    for requirement in map(Requirement, wanted):
        assert requirement.specifier.contains(pins.get(canonicalize_name(requirement.name), "")), requirement
