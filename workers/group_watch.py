"""A follower's lookout for rank 0: a collective of the script may wait for a process that is no more. Torch-free."""

from __future__ import annotations

import logging
import os
import select
import threading
from multiprocessing.connection import Connection

log = logging.getLogger(__name__)

GRACE_S = 20.0
"""How long a follower may take to hear by itself that rank 0 has gone, and to end."""


class LeaderWatch:
    """Ends this process, with code 1, when rank 0 has hung up and the script has not noticed within `GRACE_S`.

    gloo does not always tell a rank that waits in a collective; only the end of the process gets it out of there.
    Owns one thread, which ends with `close`. Reads nothing from the line.
    """

    def __init__(self, line: Connection) -> None:
        self._line = line.fileno()
        self._stopped, self._stop = os.pipe()
        self._thread = threading.Thread(target=self._run, name="ps-leader-watch", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Look out no more. Call it before the line is closed. Idempotent."""
        if self._thread.is_alive():
            os.write(self._stop, b"x")
            self._thread.join()
        for end in (self._stopped, self._stop):
            if end >= 0:
                os.close(end)
        self._stopped = self._stop = -1

    def _run(self) -> None:
        waiting = select.poll()
        waiting.register(self._stopped, select.POLLIN)
        waiting.register(self._line, select.POLLRDHUP)
        if any(end == self._stopped for end, _ in waiting.poll()):
            return
        waiting.unregister(self._line)
        if waiting.poll(GRACE_S * 1000):
            return
        log.error("rank 0 of this process group is gone, and this rank has not noticed for %.0f s: it ends", GRACE_S)
        logging.shutdown()
        os._exit(1)
