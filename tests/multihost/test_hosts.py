"""A cluster over several hosts: network namespaces whose own name maps to loopback, as on many real machines."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support import netns, train
from tests.support.cluster import Process
from tests.support.netns import Host, Hosts
from tests.support.polling import assert_eventually

WHY_NOT = netns.why_not()
pytestmark = [pytest.mark.multihost, pytest.mark.skipif(bool(WHY_NOT), reason=WHY_NOT)]

PORT = 7777
"""The coordinator's; each namespace has all ports to itself."""

SCRIPT = Path(train.__file__)


@pytest.fixture(scope="module")
def hosts() -> Iterator[list[Host]]:
    """Three hosts on one network."""
    with Hosts(3) as hosts:
        yield hosts


def commands(hosts: list[Host], folder: Path) -> dict[str, tuple[Host, list[str]]]:
    """Name → host and command line of each process of a job."""
    where = f"--coordinator={hosts[0].ip}:{PORT}"
    coordinator = [
        "coordinator",
        f"--host={hosts[0].ip}",
        f"--port={PORT}",
        f"--state={folder / 'state'}",
        "--servers=2",
    ]
    worker = [str(SCRIPT), str(folder)]
    return {
        "coordinator": (hosts[0], [*coordinator, "--min-workers=2", f"--summary-file={folder / 'summary.json'}"]),
        "server-a": (hosts[1], ["server", where, "--name=server-a"]),
        "server-b": (hosts[2], ["server", where, "--name=server-b", "--interface=eth0"]),
        "worker-a": (hosts[1], ["worker", where, "--name=worker-a", *worker]),
        "worker-b": (hosts[2], ["worker", where, "--name=worker-b", f"--advertise={hosts[2].ip}", *worker]),
    }


@pytest.mark.parametrize("first", ["coordinator", "workers"])
def test_any_start_order(hosts: list[Host], tmp_path: Path, first: str) -> None:
    """The job finishes whoever comes first; servers are dialled at their hosts' addresses; all exit with 0."""
    wanted = commands(hosts, tmp_path)
    names = list(wanted) if first == "coordinator" else list(reversed(wanted))
    with contextlib.ExitStack() as stack:
        running: dict[str, Process] = {}
        for name in names:
            host, command = wanted[name]
            running[name] = stack.enter_context(Process(command, tmp_path, name, prefix=host.prefix))
            before = "listens" if name == "coordinator" else ""
            assert_eventually(lambda name=name, text=before: text in running[name].err)  # type: ignore[misc]
        for name in names:
            assert running[name].wait() == 0, f"{name}: {running[name].err}"
    assert train.seen(tmp_path)[0] == Counter(range(400))
    for name, host in (("server-a", hosts[1]), ("server-b", hosts[2])):
        assert f"serves at uv://{host.ip}:" in running[name].err


@pytest.mark.parametrize("flag", ["--advertise=127.0.0.1", "--interface=lo"])
def test_loopback_is_refused(hosts: list[Host], tmp_path: Path, flag: str) -> None:
    """An address that no other host can dial is refused at once, and the error names the flag that helps."""
    command = ["server", f"--coordinator={hosts[0].ip}:{PORT}", flag]
    with Process(command, tmp_path, "server", prefix=hosts[1].prefix) as server:
        assert server.wait() == 2
    assert "is loopback" in server.err and "--advertise" in server.err
    assert len(server.err.splitlines()) == 1


@pytest.mark.parametrize("role", ["server", "worker"])
@pytest.mark.parametrize("fault", ["refused port", "nobody there", "no route"])
def test_coordinator_that_never_comes(hosts: list[Host], tmp_path: Path, role: str, fault: str) -> None:
    """Whatever is wrong with the coordinator's address: a clear error and a non-zero exit within the stated bound."""
    ip = {"refused port": hosts[0].ip, "nobody there": hosts[0].ip.rpartition(".")[0] + ".99", "no route": "192.0.2.1"}
    command = [role, f"--coordinator={ip[fault]}:{PORT}", "--join-timeout-s=2"]
    if role == "worker":
        command += [str(SCRIPT), str(tmp_path)]
    with Process(command, tmp_path, role, prefix=hosts[1].prefix) as process:
        assert process.wait(60) in (2, 3), process.err  # a wrong address, or nobody there in time
    assert ip[fault] in process.err
    assert "Traceback" not in process.err
