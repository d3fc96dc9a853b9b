"""`python -m tests.support.rpc_scenarios NAME SERVER ADDRESS`: what a caller process does in one test."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
from collections.abc import Callable
from types import FrameType

import torch

from ps.errors import AddressError, ConfigError, ForkedProcess, PeerLost
from ps.rpc.agent import RpcTransport, open_rpc
from ps.types import Incarnation
from tests.support import echo
from tests.support.rpc import within


class Stopped(Exception):
    """Raised by the signal handler."""


def say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def park(transport: RpcTransport, server: Incarnation) -> None:
    """Leave requests open until killed."""
    tickets = [transport.submit(server, echo.push(echo.PARK), None, timeout_s=60) for _ in range(20)]
    transport.submit(server, echo.push(echo.ECHO), None, timeout_s=60).result(within())
    say("parked")
    tickets[0].result(within(60))


def pull_large(transport: RpcTransport, server: Incarnation) -> None:
    """Have a large answer under way while this process is frozen."""
    ticket = transport.submit(server, echo.push(echo.POOL), None, timeout_s=60)
    transport.submit(server, echo.push(echo.ECHO), None, timeout_s=60).result(within())
    say("parked")
    ticket.result(within(60))


def wait_for_signal(transport: RpcTransport, server: Incarnation) -> None:
    """Wait long on the main thread; a handler ends the wait."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise Stopped

    signal.signal(signal.SIGTERM, stop)
    ticket = transport.submit(server, echo.push(echo.PARK), None, timeout_s=60)
    try:
        say("waiting")
        ticket.result(within(60))
    except Stopped:
        say("handled")


def raise_error(transport: RpcTransport, server: Incarnation) -> None:
    """A user's script that fails after RPC was started."""
    transport.submit(server, echo.push(echo.PARK), None, timeout_s=60)
    raise LookupError("the user's mistake")


def just_end(transport: RpcTransport, server: Incarnation) -> None:
    """A script that forgets to close."""
    transport.submit(server, echo.push(echo.ECHO), None, timeout_s=60).result(within())


def close_in_flight(transport: RpcTransport, server: Incarnation) -> None:
    """Close with a request open; then nothing works any more, and there is no second agent."""
    ticket = transport.submit(server, echo.push(echo.PARK), None, timeout_s=60)
    transport.close()
    transport.close()
    attempts: list[Callable[[], object]] = [
        lambda: ticket.result(within()),
        lambda: transport.submit(server, echo.push(echo.ECHO), None, timeout_s=1),
        lambda: transport.connect(server, "echo", "uv://127.0.0.1:1", b"", timeout_s=1),
        lambda: open_rpc(incarnation=Incarnation(9002), name="again", host_ip="127.0.0.1"),
    ]
    for attempt in attempts:
        try:
            attempt()
        except Exception as error:
            say(type(error).__name__)
    say(f"wedged {transport.wedged}")


def close_on_frozen(transport: RpcTransport, server: Incarnation) -> None:
    """Close while a large push is stuck on its way to a server that is frozen by now."""
    say("connected")
    sys.stdin.readline()
    payload = torch.zeros(64 << 20, dtype=torch.uint8)
    ticket = transport.submit(server, echo.push(echo.ECHO), payload, timeout_s=60)
    transport.close()
    try:
        ticket.result(within())
    except PeerLost:
        say(f"lost, wedged {transport.wedged}")


def fork(transport: RpcTransport, server: Incarnation) -> None:
    """Use the transport in forked children, plain and by multiprocessing; the parent is unaffected."""
    ticket = transport.submit(server, echo.push(echo.PARK), None, timeout_s=60)

    def child() -> None:
        attempts: list[Callable[[], object]] = [
            lambda: transport.submit(server, echo.push(echo.ECHO), None, timeout_s=5),
            lambda: transport.connect(server, "echo", "uv://127.0.0.1:1", b"", timeout_s=5),
            lambda: transport.disconnect(server),
            lambda: ticket.result(within(5)),
        ]
        refused = 0
        for attempt in attempts:
            try:
                attempt()
            except ForkedProcess:
                refused += 1
        transport.close()
        say(f"refused {refused}")

    pid = os.fork()
    if pid == 0:
        child()
        os._exit(0)
    say(f"exit {os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])}")
    process = multiprocessing.get_context("fork").Process(target=child)
    process.start()
    process.join(30)
    say(f"exit {process.exitcode}")
    transport.submit(server, echo.push(echo.RELEASE), None, timeout_s=60).result(within())
    ticket.result(within())
    say("parent goes on")


def loopback_only() -> None:
    """Ask for an address elsewhere while RPC binds to loopback."""
    try:
        open_rpc(incarnation=Incarnation(9001), name="w", host_ip="192.0.2.1", interface="lo")
    except AddressError as error:
        say(str(error))
    try:
        open_rpc(incarnation=Incarnation(9001), name="w", host_ip="127.0.0.1")
    except ConfigError as error:
        say(str(error))


SCENARIOS = {
    f.__name__: f
    for f in (park, pull_large, wait_for_signal, raise_error, just_end, close_in_flight, close_on_frozen, fork)
}


def main() -> None:
    """Run one scenario."""
    if sys.argv[1] == "loopback_only":
        loopback_only()
        return
    server = Incarnation(int(sys.argv[2]))
    own = Incarnation(9100 + list(SCENARIOS).index(sys.argv[1]))  # a number used twice would alias references
    transport = open_rpc(incarnation=own, name="scenario", host_ip="127.0.0.1")
    transport.connect(server, "echo", sys.argv[3], bytes(16), timeout_s=60)
    SCENARIOS[sys.argv[1]](transport, server)


if __name__ == "__main__":
    main()
