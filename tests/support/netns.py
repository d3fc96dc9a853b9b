"""Hosts as network namespaces on one bridge: each with an address, a loopback and an /etc/hosts of its own.

Needs root. Every name holds this process's id, so that two test runs don't meet, and everything is removed at the end.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

SUBNET = "10.231"
"""First half of the hosts' addresses; the third number comes from the process id."""


def why_not() -> str:
    """Why namespaces can't be used here; empty when they can."""
    if shutil.which("ip") is None:
        return "no `ip` command (iproute2)"
    if os.geteuid() != 0:
        return "needs root"
    name = f"pst{os.getpid() % 100000}-try"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True)
    if made.returncode != 0:
        return f"network namespaces are not permitted: {made.stderr.strip()}"
    veth = subprocess.run(
        ["ip", "link", "add", "v0", "netns", name, "type", "veth", "peer", "name", "v1", "netns", name],
        capture_output=True, text=True,
    )  # fmt: skip
    _ip("netns", "del", name)
    return "" if veth.returncode == 0 else f"no veth: {veth.stderr.strip()}"


class Host:
    """One host: commands run in it see only its own network, and its own name maps to loopback, as on many machines."""

    def __init__(self, name: str, ip: str) -> None:
        self.name = name
        self.ip = ip

    @property
    def prefix(self) -> Sequence[str]:
        """What to put before a command to run it on this host."""
        return ("ip", "netns", "exec", self.name)


class Hosts:
    """`count` hosts that reach each other over a bridge; a context manager that removes them."""

    def __init__(self, count: int) -> None:
        tag = os.getpid() % 100000
        self._bridge_ns = f"pst{tag}-br"
        self._subnet = f"{SUBNET}.{tag % 250}"
        self._hosts = [Host(f"pst{tag}-h{n}", f"{self._subnet}.{n + 1}") for n in range(count)]

    def __enter__(self) -> list[Host]:
        try:
            self._make()
        except BaseException:
            self._remove()
            raise
        return self._hosts

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._remove()

    def _make(self) -> None:
        # the bridge lives in a namespace too: nothing is added to the machine's own network
        _ip("netns", "add", self._bridge_ns)
        _ip("-n", self._bridge_ns, "link", "add", "name", "br0", "type", "bridge")
        _ip("-n", self._bridge_ns, "link", "set", "br0", "up")
        for number, host in enumerate(self._hosts):
            _ip("netns", "add", host.name)
            # `ip netns exec` mounts this over /etc/hosts
            folder = Path("/etc/netns") / host.name
            folder.mkdir(parents=True)
            own = os.uname().nodename
            (folder / "hosts").write_text(f"127.0.0.1 localhost\n127.0.1.1 {own}\n")
            port = f"p{number}"
            _ip(
                "link",
                "add",
                "eth0",
                "netns",
                host.name,
                "type",
                "veth",
                "peer",
                "name",
                port,
                "netns",
                self._bridge_ns,
            )
            _ip("-n", self._bridge_ns, "link", "set", port, "master", "br0", "up")
            _ip("-n", host.name, "addr", "add", f"{host.ip}/24", "dev", "eth0")
            for device in ("lo", "eth0"):
                _ip("-n", host.name, "link", "set", device, "up")

    def _remove(self) -> None:
        for name in (self._bridge_ns, *(host.name for host in self._hosts)):
            subprocess.run(["ip", "netns", "del", name], capture_output=True)
            shutil.rmtree(Path("/etc/netns") / name, ignore_errors=True)
        with contextlib.suppress(OSError):
            Path("/etc/netns").rmdir()  # only when nobody else uses it


def _ip(*arguments: str) -> None:
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True)
    assert done.returncode == 0, f"ip {' '.join(arguments)}: {done.stderr}"
