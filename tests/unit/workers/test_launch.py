"""When `psctl local` refuses and when it gives up."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ps.config import CoordinatorConfig, MemberConfig, ServerConfig
from ps.errors import ConfigError, PsError
from ps.types import Address
from workers.dashboard import open_dashboard
from workers.launch import Launcher, LocalConfig


@pytest.mark.parametrize(
    ("flags", "words"),
    [({"workers": 0}, "--workers 0"), ({"servers": 0}, "--servers 0"), ({"shard_bytes": -4}, "--shard-bytes -4")],
)
def test_mistakes_are_refused_before_anything_starts(flags: dict[str, Any], words: str) -> None:
    """What the coordinator could not work with is said as a wrong flag."""
    with pytest.raises(ConfigError, match=words):
        LocalConfig(script=Path(__file__), **flags)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({"shard_bytes": -1}, "--shard-bytes -1"),
        ({"min_workers": -1}, "--min-workers -1"),
        ({"max_members": 0}, "--max-members 0"),
        ({"transports": ("foo",)}, "--transports foo must end in 'uv'"),
        ({"channels": ()}, "--channels  must end in 'basic'"),
        ({"no_workers_s": 0.0}, "--no-workers-s"),
        ({"lost_coordinator_s": float("nan")}, "--lost-coordinator-s"),
    ],
)
def test_mistakes_of_a_coordinator(flags: dict[str, Any], words: str) -> None:
    """Numbers below their bound are named with their flag."""
    with pytest.raises(ConfigError, match=words):
        CoordinatorConfig(state=Path("state"), **flags)


@pytest.mark.parametrize("name", ["rpc_threads", "apply_threads", "snapshots"])
def test_mistakes_of_a_server(name: str) -> None:
    """A server without threads or reply buffers would never answer."""
    flags: dict[str, Any] = {name: 0}
    with pytest.raises(ConfigError, match=f"--{name.replace('_', '-')} 0 must be at least 1"):
        ServerConfig(member=MemberConfig(coordinator=Address("h", 1)), **flags)


class _Deaf:
    """The line to a coordinator that runs and answers nothing."""

    silent = True

    def __init__(self) -> None:
        self.orders: list[str] = []

    def stop_job(self, *, interrupted: bool, reason: str) -> None:
        self.orders.append(reason)


class _Child:
    role = name = "coordinator"
    log = Path("coordinator.log")


def test_a_coordinator_that_does_not_answer_is_given_up(tmp_path: Path) -> None:
    """The last worker has left, the coordinator is told to end the job and does not: the launcher doesn't wait on."""
    config = LocalConfig(script=Path(__file__), settle_s=0.0, grace_s=0.0)
    with open_dashboard() as board:
        launcher: Any = Launcher(config, tmp_path, board)
    launcher._poller, launcher._children = _Deaf(), [_Child()]
    launcher._settle(None)
    assert launcher._poller.orders == ["no worker is left: "]
    with pytest.raises(PsError, match=r"did not end the job within 0 s.*coordinator\.log"):
        launcher._settle(None)
