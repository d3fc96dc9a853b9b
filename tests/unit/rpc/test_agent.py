"""What `open_rpc` refuses before or just after it has an agent. Real agents: `tests/integration/test_rpc_*.py`."""

from __future__ import annotations

import pytest

from ps.errors import AddressError, ConfigError
from ps.rpc import agent
from ps.types import Incarnation


@pytest.mark.parametrize("incarnation", [0, -1, 16384])
def test_incarnations_out_of_range(incarnation: int) -> None:
    """0 means nobody, and aliases start at 16384."""
    with pytest.raises(ConfigError, match="16383"):
        agent.open_rpc(incarnation=Incarnation(incarnation), name="w", host_ip="127.0.0.1")


@pytest.mark.parametrize(
    ("transports", "channels"),
    [
        ((), ("basic",)),
        (("shm",), ("basic",)),
        (("uv",), ("mpt_uv",)),
        (("uv", "shm"), ("basic",)),
        (("tcp", "uv"), ("basic",)),
        (("uv",), ("cuda_ipc", "basic")),
    ],
)
def test_backends_that_peers_may_lack(transports: tuple[str, ...], channels: tuple[str, ...]) -> None:
    """Without `uv` and `basic` as last resort two processes abort at their first tensor."""
    with pytest.raises(ConfigError, match="which every member has"):
        agent.open_rpc(
            incarnation=Incarnation(1), name="w", host_ip="127.0.0.1", transports=transports, channels=channels
        )


def test_address_of_another_host() -> None:
    """An address that no interface has is refused before anything is started."""
    with pytest.raises(AddressError, match=r"192\.0\.2\.77"):
        agent.open_rpc(incarnation=Incarnation(1), name="w", host_ip="192.0.2.77")


def test_interface_that_does_not_exist() -> None:
    """TensorPipe would take 127.0.0.1 without a word."""
    with pytest.raises(AddressError, match="nosuch0"):
        agent.open_rpc(incarnation=Incarnation(1), name="w", host_ip="127.0.0.1", interface="nosuch0")


@pytest.mark.parametrize(
    ("url", "host_ip"),
    [
        ("uv://127.0.0.1:4000", "10.0.0.5"),
        ("uv://[::1]:4000", "10.0.0.5"),
        ("uv://[fe80::1%eth0]:4000", "2001:db8::1"),
        ("uv://[2001:db8::1]:4000", "10.0.0.5"),
        ("uv://10.0.0.5:4000", "2001:db8::1"),
    ],
)
def test_listening_where_nobody_can_dial(url: str, host_ip: str) -> None:
    """Loopback and the wrong family are refused, and the message says what to pass."""
    with pytest.raises(AddressError, match="--advertise"):
        agent._check_address(url, host_ip, "eth0")


@pytest.mark.parametrize(
    ("url", "host_ip"),
    [("uv://127.0.0.1:4", "127.0.0.1"), ("uv://10.0.0.5:4", "10.0.0.5"), ("uv://[2001:db8::1]:4", "2001:db8::1")],
)
def test_listening_where_others_can_dial(url: str, host_ip: str) -> None:
    """The address read back is the one asked for."""
    agent._check_address(url, host_ip, "eth0")
