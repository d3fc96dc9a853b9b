"""Runs a user's script as a worker process, as `python SCRIPT` would, and leaves the job as the script ended.

Torch-free: a script that never imports torch never loads it.
"""

from __future__ import annotations

import logging
import os
import runpy
import signal
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from types import FrameType, TracebackType
from typing import TYPE_CHECKING

from ps.config import MemberConfig
from ps.errors import AddressError, ConfigError, CoordinatorLost, Fenced, GroupLost, JobFailed, PsError
from ps.types import LeaveReason, Role
from workers import registry, rundir
from workers.config import follows

if TYPE_CHECKING:
    from workers.worker import Worker

EXIT_INTERRUPTED = 130
EXIT_TERMINATED = 143
"""128 + SIGTERM, as shells say it."""

LATE_JOIN_S = 10.0
"""How long a script that never joined tries to tell the coordinator that it has ended."""

_EXPECTED = {AddressError: 2, CoordinatorLost: 3, JobFailed: 1, Fenced: 1, GroupLost: 1}
"""Errors that are no fault of the script's code: one line instead of a traceback, and `psctl`'s exit codes."""

_log = logging.getLogger(__name__)


def run_script(script: Path, arguments: Sequence[str], config: MemberConfig, *, error_file: Path | None = None) -> int:
    """Run `script` as `__main__`; returns the exit code for this process. Main thread only.

    The worker that the script has joined as leaves the job: done, drained or failed. A script that never joins is
    reported all the same, so that the job can end. With `error_file` a failure is written there; without, its
    traceback goes to stderr. Raises `ConfigError` when there is no such script.
    """
    if not script.is_file():
        raise ConfigError(f"there is no script {str(script)!r}")
    signals = _Signals()
    signals.install()
    error = _run(script, arguments)
    code = _exit_code(error)
    if signals.interrupted and code == 0:
        code = EXIT_INTERRUPTED
    if code != 0 and not isinstance(error, JobFailed):
        _tell(error, code, script, config.name, error_file)
    elif error is not None and code != 0:
        _log.error("%s", error)
    _leave(error, code, config)
    return code


def _run(script: Path, arguments: Sequence[str]) -> BaseException | None:
    """Run the script; returns what it raised."""
    folder = str(script.resolve().parent)
    if sys.flags.safe_path:
        sys.path.insert(0, folder)
    else:
        sys.path[0] = folder
    sys.argv[:] = [str(script), *arguments]
    try:
        runpy.run_path(str(script), run_name="__main__")
    except BaseException as error:  # handed to `run_script`, which reports it and leaves the job
        return error
    return None


def _exit_code(error: BaseException | None) -> int:
    """What Python would exit with, and `psctl`'s codes for errors that have one."""
    if error is None:
        return 0
    if isinstance(error, SystemExit):
        if error.code is None:
            return 0
        return error.code & 0xFF if isinstance(error.code, int) else 1
    if isinstance(error, KeyboardInterrupt):
        return EXIT_INTERRUPTED
    return next((code for kind, code in _EXPECTED.items() if isinstance(error, kind)), 1)


def _tell(error: BaseException | None, code: int, script: Path, name: str, error_file: Path | None) -> None:
    """Say how the script failed: in a file for the launcher, which shows it last, or on stderr."""
    text = _shown(error, script)
    if error_file is None:
        sys.stderr.write(text)
        sys.stderr.flush()
        return
    line = _line(error, code)
    _log.error("the script failed: %s", line)
    rundir.write_failure(error_file, rundir.Failure(name=name, exit_code=code, error=line, traceback=text))


def _shown(error: BaseException | None, script: Path) -> str:
    """What Python would print for it: the message of `sys.exit("message")`, or a traceback from the script down."""
    if isinstance(error, SystemExit):
        return f"{error.code}\n" if isinstance(error.code, str) else ""
    if error is None or isinstance(error, KeyboardInterrupt):
        return ""
    if isinstance(error, tuple(_EXPECTED)):
        return f"psctl: {type(error).__name__}: {error}\n"
    return "".join(traceback.format_exception(type(error), error, _from_script(error.__traceback__, script)))


def _line(error: BaseException | None, code: int) -> str:
    """The failure in one line."""
    if error is None or isinstance(error, SystemExit):
        message = error.code if error is not None and isinstance(error.code, str) else ""
        return message.strip().partition("\n")[0] or f"exit code {code}"
    return "".join(traceback.format_exception_only(error)).strip().splitlines()[-1]


def _from_script(tb: TracebackType | None, script: Path) -> TracebackType | None:
    """The traceback without the frames that started the script; None when it failed to compile."""
    while tb is not None and tb.tb_frame.f_code.co_filename != str(script):
        tb = tb.tb_next
    return tb


def _joined() -> Worker | None:
    """The worker that the script has joined as and not closed yet."""
    return registry.current()


def _leave(error: BaseException | None, code: int, config: MemberConfig) -> None:
    """Leave the job, bounded. A failure to do so is logged: the script's own end is what counts."""
    worker = _joined()
    try:
        if worker is not None:
            worker.finish(error)
        elif "workers.cluster" not in sys.modules and not follows():  # loaded by `join()` in a job with a coordinator
            _report_without_worker(error, code, config)
    except PsError as problem:
        _log.warning("could not leave the job: %s", problem)


def _report_without_worker(error: BaseException | None, code: int, config: MemberConfig) -> None:
    """Join and leave for a script that did neither: its end counts like any other worker's."""
    from ps.control.client import GrpcControl

    control = GrpcControl(config.coordinator)
    try:
        control.join(role=Role.WORKER, name=config.name, timeout_s=min(LATE_JOIN_S, config.join_timeout_s))
        reason = LeaveReason.FAILED if code else LeaveReason.DONE
        detail = _line(error, code)[:500] if code else ""
        control.leave(reason, exit_code=code, detail=detail)
    finally:
        control.close()


class _Signals:
    """SIGTERM and Ctrl-C while the script runs.

    Once the script has joined, the worker takes SIGTERM over: the first one drains, the second comes back here.
    The first Ctrl-C of a joined worker drains too; the second interrupts as in any script.
    """

    def __init__(self) -> None:
        self.interrupted = False

    def install(self) -> None:
        """Take over both signals for the rest of the process."""
        signal.signal(signal.SIGTERM, self._on_term)
        signal.signal(signal.SIGINT, self._on_interrupt)

    def _on_term(self, number: int, frame: FrameType | None) -> None:
        if _joined() is not None:
            os._exit(EXIT_TERMINATED)  # the second one: at once, whatever the script is in
        raise SystemExit(0)

    def _on_interrupt(self, number: int, frame: FrameType | None) -> None:
        handler = signal.getsignal(signal.SIGTERM)
        if self.interrupted or _joined() is None or not callable(handler):
            raise KeyboardInterrupt
        self.interrupted = True
        _log.warning("finishing this step, then leaving; again to stop now")
        handler(signal.SIGTERM, frame)
