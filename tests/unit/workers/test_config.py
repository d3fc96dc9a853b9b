"""Settings of a worker: arguments win over the environment, mistakes are named. And what `import workers` loads."""

from __future__ import annotations

import subprocess
import sys

import pytest

import workers
from ps.errors import ConfigError
from ps.types import Address
from workers.config import WorkerConfig, load


def test_alone_without_a_coordinator() -> None:
    """Neither argument nor variable: everything in this process."""
    assert load(env={}).coordinator is None
    assert load(env={"PS_COORDINATOR": ""}).coordinator is None


def test_arguments_win_over_the_environment() -> None:
    """`join("host:port")` means that host, whatever the launcher has set."""
    env = {"PS_COORDINATOR": "a:1", "PS_NAME": "x", "PS_INTERFACE": "eth1", "PS_JOIN_TIMEOUT_S": "7.5"}
    config = load("b:2", name="y", env=env)
    assert (config.coordinator, config.name, config.interface) == (Address("b", 2), "y", "eth1")
    assert config.join_timeout_s == 7.5
    assert load(env=env).coordinator == Address("a", 1)


@pytest.mark.parametrize(
    ("env", "words"),
    [({"PS_COORDINATOR": "nowhere"}, "'nowhere' is not HOST:PORT"), ({"PS_JOIN_TIMEOUT_S": "soon"}, "'soon'")],
)
def test_mistakes_are_named(env: dict[str, str], words: str) -> None:
    """The message shows the text and what is expected."""
    with pytest.raises(ConfigError, match=words):
        load(env=env)


def test_settings_are_checked_when_made() -> None:
    """A bound of 0 would hang or refuse everything later."""
    with pytest.raises(ConfigError, match="calls_in_flight=0"):
        WorkerConfig(calls_in_flight=0)


def test_public_names() -> None:
    """Sorted, and each can be loaded."""
    assert workers.__all__ == sorted(workers.__all__)
    assert all(getattr(workers, name) for name in workers.__all__)
    with pytest.raises(AttributeError, match="has no attribute 'nonsense'"):
        workers.nonsense  # noqa: B018


@pytest.mark.slow
def test_importing_workers_loads_neither_torch_nor_grpc() -> None:
    """The launcher must set the memory settings before torch is there."""
    code = "import sys, workers; print([m for m in ('torch', 'grpc') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"
