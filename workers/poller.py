"""The launcher's line to the coordinator: a thread that polls its status and passes orders on, one after the other."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable

from ps.control import client
from ps.errors import PsError
from ps.types import Address
from ps.v1.coordinator_pb2 import StatusReply

POLL_S = 0.3
"""Between two looks at the status."""
CALL_S = 3.0
"""Deadline of one call: the coordinator is on this host."""
_ORDERS = 10_000
"""Bound on orders that wait; an exit of each child and two more are all that comes."""

_log = logging.getLogger(__name__)


class Poller:
    """Thread-safe. `close` ends the thread, within two calls' deadlines."""

    def __init__(self, address: Address) -> None:
        self.address = address
        self.latest: StatusReply | None = None
        """The newest status; replaced as a whole."""
        self.silent = False
        """Whether the coordinator did not answer the last look: `latest` is an older one."""
        self._orders: queue.Queue[Callable[[], object] | None] = queue.Queue(_ORDERS)
        self._stopped = False
        self._gone = False
        self._thread = threading.Thread(target=self._run, name="launcher-poll", daemon=True)

    def start(self) -> None:
        """Start polling."""
        self._thread.start()

    def report_exit(self, name: str, pid: int, exit_code: int) -> None:
        """Tell that this child is gone and that none will take its place."""
        self._orders.put(lambda: _report(self.address, name, pid, exit_code))

    def stop_job(self, *, interrupted: bool, reason: str) -> None:
        """End the job early. Only the first call counts."""
        if not self._stopped:
            self._stopped = True
            self._orders.put(
                lambda: client.stop(self.address, interrupted=interrupted, reason=reason, timeout_s=CALL_S)
            )

    def release(self) -> None:
        """Let servers and coordinator go. The last order: later ones would wait for a coordinator that is gone."""
        self._orders.put(lambda: client.release(self.address, timeout_s=CALL_S))
        self._orders.put(None)

    def give_up(self) -> None:
        """The coordinator is gone: what is still to be said is dropped."""
        self._gone = True

    def close(self) -> None:
        """End the thread; orders that wait are passed on first."""
        self._orders.put(None)
        if self._thread.is_alive():
            self._thread.join(3 * CALL_S)

    def _run(self) -> None:
        while True:
            try:
                order = self._orders.get(timeout=POLL_S)
            except queue.Empty:
                order = self._poll
            if order is None or self._gone:
                return
            try:
                order()
            except PsError as error:
                _log.debug("the coordinator did not answer: %s", error)

    def _poll(self) -> None:
        self.silent = True  # unless it answers: a frozen coordinator takes the whole deadline
        self.latest = client.status(self.address, CALL_S)
        self.silent = False


def _report(address: Address, name: str, pid: int, exit_code: int) -> None:
    client.report_exit(address, name=name, pid=pid, exit_code=exit_code, final=True, timeout_s=CALL_S)
