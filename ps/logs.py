"""Log lines with the process's role and name in them, and lines that appear on change only.

Modules log through `logging.getLogger(__name__)` with `%` arguments; only command-line entry points call `setup`.
"""

from __future__ import annotations

import logging
import sys
import threading
from typing import TextIO

FORMAT = "%(asctime)s %(levelname)-7s [%(who)s] %(message)s"
"""One line: time of day, level, who, message."""


class _Who(logging.Filter):
    """Adds `who` to each record; a filter and not a formatter field, so that it can change while handlers stay."""

    def __init__(self) -> None:
        super().__init__()
        self.who = "psctl"

    def filter(self, record: logging.LogRecord) -> bool:
        record.who = self.who
        return True


_who = _Who()


def setup(*, who: str, level: str = "INFO", stream: TextIO | None = None) -> None:
    """Send this process's log lines to `stream` (default: stderr), once; later calls replace the earlier one.

    Only the loggers of `ps` and `workers` are touched: other libraries' logging belongs to the user's script.
    """
    _who.who = who
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(logging.Formatter(FORMAT, datefmt="%H:%M:%S"))
    handler.addFilter(_who)
    for name in ("ps", "workers"):
        logger = logging.getLogger(name)
        logger.handlers[:] = [handler]
        logger.setLevel(level)
        logger.propagate = False


def identify(who: str) -> None:
    """Name this process in the lines to come, e.g. `worker-1#17` once the coordinator has given the number."""
    _who.who = who


class OnChange:
    """Logs a message only when it differs from the one before. Thread-safe."""

    def __init__(self, logger: logging.Logger, level: int = logging.INFO) -> None:
        self._logger = logger
        self._level = level
        self._lock = threading.Lock()  # guards _last
        self._last = ""

    def __call__(self, message: str) -> bool:
        """Log `message` unless it is the last one again; True if it was logged."""
        with self._lock:
            if message == self._last:
                return False
            self._last = message
        self._logger.log(self._level, "%s", message)
        return True
