"""A follower whose rank 0 is gone ends, even when its script waits where nothing tells it."""

from __future__ import annotations

import subprocess
import sys

import pytest

PROGRAM = """
import socket, threading
from multiprocessing.connection import Connection
from workers import group_watch

group_watch.GRACE_S = {grace_s}
leader, follower = socket.socketpair()
line = Connection(follower.detach())
watch = group_watch.LeaderWatch(line)
leader.close()
if {closes}:
    watch.close()
    watch.close()
threading.Event().wait({waits_s})
"""


@pytest.mark.parametrize(
    ("grace_s", "closes", "waits_s", "code"),
    [(0.1, False, 60, 1), (60, True, 0, 0)],
    ids=["not noticed", "noticed in time"],
)
def test_a_follower_ends(grace_s: float, closes: bool, waits_s: float, code: int) -> None:
    """Code 1 and a line that says why when the script does not notice; nothing at all when it closes in time."""
    program = PROGRAM.format(grace_s=grace_s, closes=closes, waits_s=waits_s)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=50)
    assert done.returncode == code, done.stderr
    assert ("rank 0 of this process group is gone" in done.stderr) == bool(code)
