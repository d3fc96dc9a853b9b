"""Secrets of members: made by the coordinator, shown to servers in derived form only.

A server learns no secret that another server accepts: to server S a caller shows `derive(secret, S)`.
"""

from __future__ import annotations

import hmac
import os

from ps.types import Incarnation

SECRET_BYTES = 16
"""Length of a member's secret and of each secret derived from it."""


def new_secret() -> bytes:
    """`SECRET_BYTES` fresh random bytes from the system's generator."""
    return os.urandom(SECRET_BYTES)


def derive(secret: bytes, server: Incarnation) -> bytes:
    """What the owner of `secret` shows to `server`: HMAC-SHA256(secret, b"ps:<server>"), first 16 bytes."""
    return hmac.digest(secret, b"ps:%d" % server, "sha256")[:SECRET_BYTES]


def matches(shown: bytes, expected: bytes) -> bool:
    """Whether two secrets are equal, in time that does not depend on where they differ. An empty one never matches."""
    return len(expected) > 0 and hmac.compare_digest(shown, expected)
