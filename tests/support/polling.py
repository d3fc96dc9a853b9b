"""Waiting for what another process or thread will make true."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable


def assert_eventually(condition: Callable[[], object], timeout_s: float = 60.0, what: str = "") -> None:
    """Ask again and again until `condition()` is true; fails after `timeout_s`: generous, as only failures wait."""
    deadline = time.monotonic() + timeout_s
    pause = threading.Event()
    while not condition():
        assert time.monotonic() < deadline, f"not within {timeout_s:g} s: {what or condition}"
        pause.wait(0.02)
