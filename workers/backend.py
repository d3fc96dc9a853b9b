"""The seam between a worker and the job around it: a cluster, or everything in this process."""

from __future__ import annotations

from typing import Protocol

from ps.control.api import Control, Joined
from ps.rpc.transport import Transport


class Backend(Protocol):
    """Where a worker's coordinator and servers are."""

    @property
    def control(self) -> Control:
        """The line to the coordinator."""
        ...

    @property
    def alone(self) -> bool:
        """True: everything is in this process."""
        ...

    def open_transport(self, joined: Joined) -> Transport:
        """Open this process's line to servers. Called once, by `attach`."""
        ...

    def close(self) -> None:
        """End what the backend started, after the worker has left. Idempotent."""
        ...
