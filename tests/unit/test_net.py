"""Addresses of this host: found, matched to interfaces, and refused when others could not dial them."""

from __future__ import annotations

import pytest

from ps import net
from ps.errors import AddressError

FAKE = [
    net.InterfaceAddress("lo", "127.0.0.1"),
    net.InterfaceAddress("eth0", "fe80::1"),
    net.InterfaceAddress("eth0", "2001:db8::5"),
    net.InterfaceAddress("eth0", "10.0.0.5"),
    net.InterfaceAddress("eth1", "fe80::2"),
]


@pytest.fixture
def interfaces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(net, "interface_addresses", lambda: FAKE)


def test_this_host_has_a_loopback() -> None:
    """The system's list is read: loopback is there under some name, and its name leads back to it."""
    name = net.interface_of("127.0.0.1")
    assert net.InterfaceAddress(name, "127.0.0.1") in net.interface_addresses()
    assert net.address_of(name) == "127.0.0.1"


def test_route_to_this_host_is_loopback() -> None:
    """The way to a local coordinator leaves from a local address, by name too."""
    assert net.route_address("127.0.0.1") == "127.0.0.1"
    assert net.is_loopback(net.route_address("localhost"))


def test_host_that_can_not_be_resolved() -> None:
    """The message names it."""
    with pytest.raises(AddressError, match=r"no-such-host\.invalid"):
        net.route_address("no-such-host.invalid")


def test_interface_by_address(interfaces: None) -> None:
    """Any spelling of an address is found; all of 127/8 belongs to loopback."""
    assert net.interface_of("10.0.0.5") == "eth0"
    assert net.interface_of("2001:0db8:0::5") == "eth0"
    assert net.interface_of("127.0.1.1") == "lo"


def test_unknown_address_lists_what_there_is(interfaces: None) -> None:
    """The user sees the choice."""
    with pytest.raises(AddressError, match=r"10\.9\.9\.9.*lo 127\.0\.0\.1.*eth0 10\.0\.0\.5"):
        net.interface_of("10.9.9.9")


def test_address_by_interface(interfaces: None) -> None:
    """IPv4 first, link-local never."""
    assert net.address_of("eth0") == "10.0.0.5"
    for name in ("eth1", "nosuch"):
        with pytest.raises(AddressError, match="eth0"):
            net.address_of(name)


@pytest.mark.parametrize(
    "ip", ["127.0.0.1", "127.0.1.1", "::1", "0.0.0.0", "::", "169.254.1.1", "fe80::1", "fe80::1%eth0", "224.0.0.1"]
)
def test_addresses_that_mean_nothing_elsewhere(ip: str) -> None:
    """With a remote coordinator each is refused, and the message says what to pass."""
    with pytest.raises(AddressError, match="--advertise"):
        net.check_advertise(ip, "10.0.0.1")


def test_addresses_that_can_be_dialled() -> None:
    """Ordinary ones anywhere, loopback when the coordinator is on loopback too."""
    net.check_advertise("10.0.0.5", "10.0.0.1")
    net.check_advertise("2001:db8::5", "10.0.0.1")
    net.check_advertise("127.0.0.1", "127.0.0.1")
    net.check_advertise("127.0.0.1", "localhost")


@pytest.mark.parametrize("ip", ["0.0.0.0", "", "host.name", "10.0.0"])
def test_what_is_no_address_is_refused_anywhere(ip: str) -> None:
    """On loopback as well."""
    with pytest.raises(AddressError):
        net.check_advertise(ip, "127.0.0.1")


def test_kinds_of_addresses() -> None:
    """Names that are no addresses are neither loopback nor link-local, `localhost` apart."""
    local = [host for host in ("127.9.9.9", "::1", "localhost", "10.0.0.5", "host") if net.is_loopback(host)]
    assert local == ["127.9.9.9", "::1", "localhost"]
    on_link = [host for host in ("fe80::1", "169.254.0.1", "10.0.0.5", "host") if net.is_link_local(host)]
    assert on_link == ["fe80::1", "169.254.0.1"]
