"""Which address of this host the other members can dial: routes, interfaces, and what must not be advertised."""

from __future__ import annotations

import ctypes
import ctypes.util
import ipaddress
import socket
import sys
from typing import NamedTuple

from ps.errors import AddressError

ADVICE = "pass --advertise IP or --interface NAME of the network that the members share"


class InterfaceAddress(NamedTuple):
    """One address of one network interface of this host."""

    interface: str
    ip: str


def own_address(coordinator_host: str, *, advertise: str = "", interface: str = "") -> str:
    """The address of this host that the other members dial: `advertise`, else the one of `interface`, else the one that
    routes to the coordinator. Raises `AddressError` when they could not dial it."""
    ip = advertise or (address_of(interface) if interface else route_address(coordinator_host))
    check_advertise(ip, _resolve(coordinator_host))
    return ip


def route_address(coordinator_host: str) -> str:
    """The address of this host from which packets to `coordinator_host` leave. No packet is sent.

    Raises `AddressError` when the name can't be resolved or no route leads there.
    """
    try:
        found = socket.getaddrinfo(coordinator_host, 9, type=socket.SOCK_DGRAM)
    except OSError as error:
        raise AddressError(f"coordinator host {coordinator_host!r} can't be resolved: {error}") from None
    problem: OSError | None = None
    for family, kind, protocol, _, address in sorted(found, key=lambda row: row[0] != socket.AF_INET):
        try:
            with socket.socket(family, kind, protocol) as probe:
                probe.connect(address)  # a connected UDP socket only looks the route up
                return str(probe.getsockname()[0])
        except OSError as error:
            problem = error
    raise AddressError(f"no route to coordinator host {coordinator_host!r}: {problem}; {ADVICE}")


def interface_of(ip: str) -> str:
    """Name of the interface that has `ip`; `AddressError` listing what there is otherwise."""
    wanted = _parse(ip)
    everything = interface_addresses()
    for interface, own in everything:
        if ipaddress.ip_address(own) == wanted:
            return interface
    if wanted.is_loopback and wanted.version == 4:  # all of 127.0.0.0/8 answers, only its first address is listed
        return interface_of("127.0.0.1")
    listed = ", ".join(f"{name} {own}" for name, own in everything) or "none"
    raise AddressError(f"no interface of this host has the address {ip}; there are: {listed}")


def address_of(interface: str) -> str:
    """The address of `interface` to advertise: IPv4 before IPv6, link-local ones never."""
    everything = interface_addresses()
    usable = [own for name, own in everything if name == interface and not ipaddress.ip_address(own).is_link_local]
    if usable:
        return sorted(usable, key=lambda own: ":" in own)[0]
    listed = ", ".join(sorted({name for name, _ in everything})) or "none"
    raise AddressError(f"interface {interface!r} has no usable address; interfaces with addresses: {listed}")


def check_advertise(ip: str, coordinator_ip: str) -> None:
    """Raise `AddressError` when members that reach the coordinator at `coordinator_ip` could not dial `ip`."""
    address = _parse(ip)
    if address.is_unspecified or address.is_multicast:
        raise AddressError(f"advertised address {ip} can't be dialled; {ADVICE}")
    if is_loopback(coordinator_ip):
        return
    if address.is_loopback:
        raise AddressError(f"advertised address {ip} is loopback, the coordinator is at {coordinator_ip}; {ADVICE}")
    if address.is_link_local:
        raise AddressError(f"advertised address {ip} is link-local and means nothing to other hosts; {ADVICE}")


def is_loopback(host: str) -> bool:
    """Whether `host` is a loopback address or `localhost`."""
    if host == "localhost":
        return True
    try:
        return _parse(host).is_loopback
    except AddressError:
        return False


def is_link_local(host: str) -> bool:
    """Whether `host` is an address that is valid on one link only."""
    try:
        return _parse(host).is_link_local
    except AddressError:
        return False


def interface_addresses() -> list[InterfaceAddress]:
    """Every IPv4 and IPv6 address of this host's interfaces, in the system's order."""
    libc = ctypes.CDLL(ctypes.util.find_library("c") or None, use_errno=True)
    head = ctypes.POINTER(_IfAddrs)()
    if libc.getifaddrs(ctypes.byref(head)) != 0:
        raise AddressError(f"the interfaces of this host can't be listed (getifaddrs: errno {ctypes.get_errno()})")
    try:
        return _walk(head)
    finally:
        libc.freeifaddrs(head)


class _IfAddrs(ctypes.Structure):
    """The leading fields of `struct ifaddrs`, the same on Linux and macOS."""


_IfAddrs._fields_ = [
    ("next", ctypes.POINTER(_IfAddrs)),
    ("name", ctypes.c_char_p),
    ("flags", ctypes.c_uint),
    ("address", ctypes.c_void_p),
]


def _walk(entry: ctypes._Pointer[_IfAddrs]) -> list[InterfaceAddress]:
    found: list[InterfaceAddress] = []
    while entry:
        row = entry.contents
        ip = _ip(row.address) if row.address else ""
        if ip:
            found.append(InterfaceAddress(row.name.decode(), ip))
        entry = row.next
    return found


def _ip(sockaddr: int) -> str:
    """Text of the address in a `struct sockaddr`, empty for families other than IP."""
    head = ctypes.string_at(sockaddr, 2)
    family = head[1] if sys.platform == "darwin" else int.from_bytes(head, sys.byteorder)
    if family == socket.AF_INET:
        return socket.inet_ntop(family, ctypes.string_at(sockaddr + 4, 4))
    if family == socket.AF_INET6:
        return socket.inet_ntop(family, ctypes.string_at(sockaddr + 8, 16))
    return ""


def _resolve(host: str) -> str:
    try:
        return str(socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][4][0])
    except OSError as error:
        raise AddressError(f"coordinator host {host!r} can't be resolved: {error}") from None


def _parse(ip: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
    try:
        return ipaddress.ip_address(ip.partition("%")[0])
    except ValueError:
        raise AddressError(f"{ip!r} is not an IP address; {ADVICE}") from None
