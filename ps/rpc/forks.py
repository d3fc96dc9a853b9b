"""Forked children: RPC's threads do not exist in them, so a call would hang past its own timeout. They get an error."""

from __future__ import annotations

import os
import weakref

from ps.errors import ForkedProcess


class ForkGuard:
    """Knows whether this process is a fork of the one that made it. Thread-safe."""

    def __init__(self) -> None:
        self.forked = False
        reference = weakref.ref(self)  # hooks can't be taken back, so this one keeps nothing alive

        def trip() -> None:
            guard = reference()
            if guard is not None:
                guard.forked = True

        os.register_at_fork(after_in_child=trip)

    def check(self) -> None:
        """Raise `ForkedProcess` in a fork."""
        if self.forked:
            raise ForkedProcess(
                "torch-ps can't be used in a forked child (RPC's threads do not exist there); use the spawn or "
                "forkserver start method, or touch it only in the process that called workers.join()"
            )
