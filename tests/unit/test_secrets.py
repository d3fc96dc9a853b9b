"""Secrets: what is shown to a server is bound to that server."""

from __future__ import annotations

from ps.secrets import SECRET_BYTES, derive, matches, new_secret
from ps.types import Incarnation


def test_derived_secrets_differ_by_server_and_by_member() -> None:
    """Neither another server nor another member can show the same secret."""
    mine, other = bytes(16), b"\x01" * 16
    shown = {derive(mine, Incarnation(1)), derive(mine, Incarnation(2)), derive(other, Incarnation(1)), mine}
    assert len(shown) == 4
    assert all(len(secret) == SECRET_BYTES for secret in shown)


def test_derivation_is_pinned() -> None:
    """Processes of different builds agree: the value never changes."""
    assert derive(bytes(range(16)), Incarnation(7)).hex() == "d731a6c3cf1059ab9263ff2676b22569"


def test_new_secrets_are_fresh() -> None:
    """Two secrets are not the same."""
    assert new_secret() != new_secret()
    assert len(new_secret()) == SECRET_BYTES


def test_matches_compares_whole_values() -> None:
    """A prefix, another value or an empty secret does not match."""
    secret = new_secret()
    assert matches(secret, bytes(secret))
    assert not matches(secret[:8], secret)
    assert not matches(secret, new_secret())
    assert not matches(b"", b"")
