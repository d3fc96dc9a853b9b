"""The worker that this process has joined a job as, and its goodbye when the script ends without one. Torch-free."""

from __future__ import annotations

import atexit
import os
import sys
import threading
from typing import TYPE_CHECKING

from workers.exits import Exits

if TYPE_CHECKING:
    from workers.worker import Worker

_current: Worker | None = None
_exits = Exits()


def current() -> Worker | None:
    """The worker that this process joined last and has not closed yet."""
    return _current


def remember(worker: Worker) -> None:
    """From now on this is it; it leaves the job at the interpreter's end, if not before."""
    global _current
    _current = worker
    if not worker.alone and threading.current_thread() is threading.main_thread():
        _exits.install()
    atexit.register(_at_exit, worker, os.getpid())


def forget(worker: Worker) -> None:
    """It has left. Idempotent."""
    global _current
    atexit.unregister(_at_exit)
    if _current is worker:
        _exits.restore()
        _current = None


def _at_exit(worker: Worker, pid: int) -> None:
    """For scripts that neither close the worker nor use it as a context manager."""
    if os.getpid() == pid:
        worker.finish(getattr(sys, "last_value", None) or _exits.error)
