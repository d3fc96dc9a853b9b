"""The command lines of deploy/kubernetes, run on hosts without rights: what the manifests forbid isn't needed."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path

import pytest

from tests.repo.test_deploy import COMPONENTS, container
from tests.support import netns
from tests.support.cluster import Process
from tests.support.netns import Host, Hosts
from tests.support.polling import assert_eventually

WHY_NOT = netns.why_not()
pytestmark = [pytest.mark.multihost, pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT)]

ROOT = Path(__file__).parents[2]

CAGE = """set -e
mount --bind "$HOME" "$HOME"
mount -o remount,bind,ro /
if touch "$PWD/written" 2> /dev/null; then echo "the root file system is not read-only" >&2; exit 99; fi
exec setpriv --no-new-privs --bounding-set=-all --inh-caps=-all --ambient-caps=-all "$@"
"""
"""Only $HOME is writable, and no capability is left (of root, who has no other rights then than to its files)."""


def caged(host: Host) -> list[str]:
    """What to put before a command to run it on a host, in a cage."""
    return [*host.prefix, "unshare", "--mount", "--propagation", "private", "bash", "-c", CAGE, "cage"]


def arguments(component: str, name: str, host: Host, coordinator: Host, writable: Path) -> list[str]:
    """A container's arguments, with what Kubernetes and the image would put in."""
    values = {
        "$(POD_NAME)": name, "$(POD_IP)": host.ip, "ps-coordinator:": f"{coordinator.ip}:",
        "/state/": f"{writable}/", "/opt/examples/": f"{ROOT / 'examples'}/",
    }  # fmt: skip
    found = [str(argument) for argument in container(component)["args"]]
    for text, value in values.items():
        found = [argument.replace(text, value) for argument in found]
    return found


def capabilities(process: Process) -> set[int]:
    """What a process may do beyond its user's rights: effective, permitted and bounding sets."""
    lines = Path(f"/proc/{process.process.pid}/status").read_text().splitlines()
    return {int(line.split()[1], 16) for line in lines if line.startswith(("CapEff", "CapPrm", "CapBnd"))}


def test_a_job_without_rights(tmp_path: Path) -> None:
    """A coordinator, two servers and two workers, started as the manifests say, train on a root file system that is
    read-only and without capabilities; all exit with 0."""
    writable = tmp_path / "writable"
    writable.mkdir()
    env = {"HOME": str(writable), "TMPDIR": str(writable), "PYTHONDONTWRITEBYTECODE": "1"}
    with Hosts(2) as hosts, contextlib.ExitStack() as stack:
        running: dict[str, Process] = {}
        for component in COMPONENTS:
            for number in range(1 if component == "coordinator" else 2):
                host, name = hosts[number], f"ps-{component}-{number}"
                command = arguments(component, name, host, hosts[0], writable)
                if component == "worker":
                    command += ["--epochs", "2"]
                process = Process(command, tmp_path, name, env=env, prefix=caged(host))
                running[name] = stack.enter_context(process)
            if component == "coordinator":
                assert_eventually(lambda: "coordinator listens" in running["ps-coordinator-0"].err)
                assert capabilities(running["ps-coordinator-0"]) == {0}
        for name, process in running.items():
            assert process.wait() == 0, f"{name}: {process.err}"
    assert json.loads((writable / "summary.json").read_text())["outcome"] == "finished"
    for number, host in enumerate(hosts):
        assert f"serves at uv://{host.ip}:" in running[f"ps-server-{number}"].err
