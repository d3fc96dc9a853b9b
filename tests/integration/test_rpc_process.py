"""The data plane seen from the caller's process: signals, forks, ends, addresses; each caller is a child."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest

from tests.support.rpc import Child


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    """Server 120."""
    with Child("-m", "tests.support.echo_server", "120") as child:
        yield child.line()
        code, _, err = child.finish()
    assert (code, err) == (0, "")


def caller(scenario: str, address: str) -> Child:
    return Child("-m", "tests.support.rpc_scenarios", scenario, "120", address)


def test_signal_handlers_run_during_a_wait(address: str) -> None:
    """SIGTERM is handled while the main thread waits for an answer that does not come."""
    with caller("wait_for_signal", address) as child:
        assert child.line() == "waiting"
        child.signal(signal.SIGTERM)
        assert child.line() == "handled"
        assert child.finish() == (0, "", "")


def test_forked_children_get_an_error(address: str) -> None:
    """Every use of the transport in a fork raises at once, ends cleanly, and leaves the parent working."""
    with caller("fork", address) as child:
        code, out, err = child.finish()
    assert out.splitlines() == ["refused 4", "exit 0", "refused 4", "exit 0", "parent goes on"]
    assert (code, err) == (0, "")


def test_script_that_raises_ends_with_its_own_traceback(address: str) -> None:
    """No abort, no noise of ours after the user's error, exit code 1."""
    with caller("raise_error", address) as child:
        code, _, err = child.finish()
    assert code == 1
    assert err.rstrip().endswith("LookupError: the user's mistake")


def test_script_that_forgets_to_close_ends_cleanly(address: str) -> None:
    """The transport closes itself at exit."""
    with caller("just_end", address) as child:
        assert child.finish() == (0, "", "")


def test_close_ends_everything(address: str) -> None:
    """Requests in flight and later ones are lost; there is one agent per process life."""
    with caller("close_in_flight", address) as child:
        code, out, err = child.finish()
    assert out.splitlines() == ["PeerLost", "PeerLost", "PeerLost", "ConfigError", "wedged False"]
    assert (code, err) == (0, "")


def test_close_does_not_wait_for_a_frozen_server() -> None:
    """A large push on its way to a stopped server ends as lost, and `close` returns within its bound."""
    with Child("-m", "tests.support.echo_server", "121") as server:
        address = server.line()
        with Child("-m", "tests.support.rpc_scenarios", "close_on_frozen", "121", address) as child:
            assert child.line() == "connected"
            server.signal(signal.SIGSTOP)
            code, out, err = child.finish()
    assert (code, out, err) == (0, "lost, wedged False\n", "")


def test_loopback_is_not_advertised_to_others() -> None:
    """When RPC can only listen on loopback, a host that is to be reached elsewhere is told what to pass."""
    with Child("-m", "tests.support.rpc_scenarios", "loopback_only") as child:
        code, out, err = child.finish()
    first, second = out.splitlines()
    assert "--advertise" in first
    assert "127.0.0.1" in first
    assert "new process" in second
    assert (code, err) == (0, "")
