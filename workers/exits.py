"""The code that the interpreter is about to end with. Torch-free.

Exit handlers are not told it: an uncaught exception is kept in `sys.last_value`, but a `SystemExit` is not. So
`sys.exit` is replaced while a worker is joined, and raises a `SystemExit` that notices who lets go of it in the end.
`raise SystemExit(3)`, the `exit(3)` of interactive sessions and `os._exit(3)` go unnoticed; in a `with` block of the
worker all but the last are seen anyway, and under `psctl` all of them.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from typing import NoReturn


class ExitCall(SystemExit):
    """What `sys.exit` raises in a process that has joined a job."""

    def __init__(self, code: object, uncaught: Callable[[object], None]) -> None:
        super().__init__(code)
        self._uncaught = uncaught

    def __del__(self) -> None:
        # If anybody had caught it, it would end in a function of his. The interpreter's own handler is none.
        if sys._getframe().f_back is None and threading.current_thread() is threading.main_thread():
            self._uncaught(self.code)


class Exits:
    """Listens to `sys.exit` between `install` and `restore`. Main thread only."""

    def __init__(self) -> None:
        self.error: SystemExit | None = None
        """What ends the interpreter, once that is certain."""
        self._previous: Callable[..., NoReturn] | None = None

    def install(self) -> None:
        """Replace `sys.exit`."""
        self._previous = sys.exit
        sys.exit = self._exit

    def restore(self) -> None:
        """Put the previous one back, if ours is still in place. Idempotent."""
        if self._previous is not None and sys.exit == self._exit:
            sys.exit = self._previous
        self._previous = None

    def _exit(self, status: object = None, /) -> NoReturn:
        """Exit the interpreter by raising SystemExit(status); see `sys.exit`."""
        raise ExitCall(status, self._note)

    def _note(self, code: object) -> None:
        self.error = SystemExit(code)
