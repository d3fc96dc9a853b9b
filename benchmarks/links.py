"""The network between the two sides of a benchmark: loopback, or two network namespaces joined by a shaped veth pair.

A shaped link has its full rate in each direction (a token bucket, `tbf`, at both ends). Its byte counters prove that
what was measured crossed it. Over a link only `uv` + `basic` are used: TensorPipe's `cma` channel reads the other
process's memory, also across network namespaces, so it would go around the link.
"""

from __future__ import annotations

import json
import os
import subprocess
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

LINKS = ("loopback", "100mbit", "200mbit", "1gbit", "10gbit")

_RATES = {"100mbit": 100e6 / 8, "200mbit": 200e6 / 8, "1gbit": 1e9 / 8, "10gbit": 10e9 / 8}
"""Bytes per second on the wire, one direction."""

_BURSTS = {"100mbit": "64k", "200mbit": "64k", "1gbit": "256k", "10gbit": "1500k"}
"""What goes out unshaped at once: as little as the kernel's timers allow at that rate."""

_PAYLOAD_SHARE = 1448 / 1514
"""TCP payload in a full Ethernet frame of 1514 bytes (IPv4, timestamps): all a sender can get of the shaped rate."""

_INTERFACE = "psb"


@dataclass(frozen=True, slots=True)
class Side:
    """One end of a link."""

    ip: str
    interface: str
    prefix: tuple[str, ...] = ()
    """Goes before a command that is to run on this side."""


class Link:
    """A link by name; makes namespaces and veth on entry and removes them on exit. Needs root but for `loopback`."""

    def __init__(self, name: str) -> None:
        if name not in LINKS:
            raise ValueError(f"link {name!r} is none of {', '.join(LINKS)}")
        self.name = name
        self.payload_bytes_per_s = _RATES[name] * _PAYLOAD_SHARE if name in _RATES else None
        """TCP payload per second, one direction; None = not shaped."""
        self._names = (f"psb-a-{os.getpid()}", f"psb-b-{os.getpid()}")
        self.near = self.far = Side("127.0.0.1", "lo")
        """Workers are near, servers and the coordinator far."""

    @property
    def shaped(self) -> bool:
        """Whether there is a rate to keep to."""
        return self.name != "loopback"

    def bytes_crossed(self) -> int:
        """Bytes that have crossed so far, both directions together."""
        if not self.shaped:
            return _transmitted(None, "lo")
        return sum(_transmitted(namespace, _INTERFACE) for namespace in self._names)

    def __enter__(self) -> Link:
        if not self.shaped:
            return self
        near, far = self._names
        _remove_abandoned()
        try:
            _ip("netns", "add", near)
            _ip("netns", "add", far)
            _ip("link", "add", _INTERFACE, "netns", near, "type", "veth", "peer", "name", _INTERFACE, "netns", far)
            for namespace, address in ((near, "10.99.7.1/30"), (far, "10.99.7.2/30")):
                self._set_up(namespace, address)
        except BaseException:
            self._remove()
            raise
        self.near = Side("10.99.7.1", _INTERFACE, ("ip", "netns", "exec", near))
        self.far = Side("10.99.7.2", _INTERFACE, ("ip", "netns", "exec", far))
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if self.shaped:
            self._remove()

    def _set_up(self, namespace: str, address: str) -> None:
        _ip("-n", namespace, "addr", "add", address, "dev", _INTERFACE)
        _ip("-n", namespace, "link", "set", "lo", "up")
        _ip("-n", namespace, "link", "set", _INTERFACE, "up")
        shaper = ["tbf", "rate", self.name, "burst", _BURSTS[self.name], "latency", "20ms"]
        _run("tc", "-n", namespace, "qdisc", "add", "dev", _INTERFACE, "root", *shaper)

    def _remove(self) -> None:
        for namespace in self._names:
            _delete(namespace)


def _remove_abandoned() -> None:
    """Namespaces of benchmarks that were killed."""
    for line in _run("ip", "netns", "list").splitlines():
        name = line.split()[0]
        owner = name.rpartition("-")[2]
        if name.startswith(("psb-a-", "psb-b-")) and not Path(f"/proc/{owner}").exists():
            _delete(name)


def _delete(namespace: str) -> None:
    subprocess.run(["ip", "netns", "del", namespace], capture_output=True, timeout=20, check=False)


def _transmitted(namespace: str | None, interface: str) -> int:
    inside = ["-n", namespace] if namespace else []
    shown = json.loads(_run("ip", *inside, "-s", "-j", "link", "show", "dev", interface))
    return int(shown[0]["stats64"]["tx"]["bytes"])


def _ip(*arguments: str) -> None:
    _run("ip", *arguments)


def _run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip() or f'exit {done.returncode}'}")
    return done.stdout
