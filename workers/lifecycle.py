"""What may end a worker: signals, the coordinator's news, forks; turned into errors on the training thread.

Torch-free. News arrive on the session's thread and are only written down here; `check` raises them on the
thread that trains, at the next step or batch.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from types import FrameType

from ps.consistency.policy import Ruling
from ps.control.api import Admitted, ShardMap, WorkerProgress
from ps.errors import CoordinatorLost, Fenced, ForkedProcess, JobFailed, PsError
from ps.types import JobState, LeaveReason

Handler = Callable[[int, FrameType | None], object]
"""A Python signal handler."""


class WorkerDrained(SystemExit):
    """Raised after this worker has left on request (SIGTERM or the coordinator); exit code 0."""

    def __init__(self, reason: str = "") -> None:
        super().__init__(0)
        self.reason = reason


class WorkerStopped(SystemExit):
    """Raised when the job was ended by others without having failed; exit code 130 for an interrupted job, else 0."""

    def __init__(self, code: int = 0, reason: str = "") -> None:
        super().__init__(code)
        self.reason = reason


class Lifecycle:
    """News about this worker's life. Implements `SessionListener`; thread-safe.

    No locks: a signal handler may run between any two steps of the main thread. Each field is replaced as a whole,
    by one thread (the drain request by two, and either may win).
    """

    def __init__(self) -> None:
        self._pid = os.getpid()
        self._error: PsError | None = None
        self._over: tuple[JobState, str] | None = None
        self._drain = ""
        self._progress = WorkerProgress()
        self.news = threading.Event()
        """Set on anything that should cut a wait short."""

    @property
    def draining(self) -> bool:
        """Whether this worker has been asked to leave."""
        return bool(self._drain)

    @property
    def drain_reason(self) -> str:
        """Who asked it to leave; empty when nobody did."""
        return self._drain

    @property
    def fatal(self) -> bool:
        """Whether the coordinator no longer takes work from this worker."""
        return self._error is not None or self._over is not None

    @property
    def gone(self) -> bool:
        """Whether nobody waits for this worker's goodbye: it was evicted, or the coordinator is lost. After the end of
        the job the coordinator does wait for it."""
        return self._error is not None

    def check(self) -> None:
        """Raise what has happened to the worker or its job, if anything has. Call on the training thread.

        Raises `ForkedProcess`, `Fenced`, `CoordinatorLost`, `JobFailed` or `WorkerStopped`.
        """
        self.check_fork()
        if self._error is not None:
            raise self._error
        over = self._over
        if over is None:
            return
        state, reason = over
        if state is JobState.FAILED:
            raise JobFailed(f"the job has failed: {reason}")
        raise WorkerStopped(130 if state is JobState.INTERRUPTED else 0, f"the job is {state.value}: {reason}")

    def check_fork(self) -> None:
        """Raise `ForkedProcess` in a forked child: neither RPC nor gRPC survives a fork."""
        if os.getpid() != self._pid:
            raise ForkedProcess(
                f"this worker belongs to process {self._pid}, and this is its forked child {os.getpid()}; use the "
                "worker in the parent only (DataLoader workers: load data there, call the worker outside)"
            )

    def request_drain(self, reason: str) -> bool:
        """Ask for a drain; False when one was asked for already."""
        if self._drain:
            return False
        self._drain = reason
        return True

    def count_step(self, samples: int) -> None:
        """Note a step whose push was applied on every shard."""
        before = self._progress
        self._progress = WorkerProgress(steps=before.steps + 1, samples=before.samples + samples)

    def on_membership(self, version: int, admitted: tuple[Admitted, ...]) -> tuple[int, ...]:
        """Not for workers."""
        return ()

    def on_rulings(self, rulings: tuple[Ruling, ...]) -> None:
        """Not for workers."""

    def on_shard_map(self, shard_map: ShardMap) -> None:
        """Nothing to do at once: the newest map is asked of `Control.shard_map` when a server says MOVED."""

    def on_job(self, state: JobState, reason: str, release: bool) -> None:
        """Note the end of the job."""
        if state.over:
            self._over = (state, reason)
            self.news.set()

    def on_drain(self, reason: str) -> None:
        """Note the coordinator's wish."""
        self.request_drain(reason or "the coordinator asked for it")

    def on_fenced(self, reason: str) -> None:
        """Note the eviction."""
        self._fail(Fenced(f"this worker was evicted by the coordinator: {reason}; start it again to rejoin the job"))

    def on_lost(self, reason: str) -> None:
        """Note that there is no coordinator any more."""
        self._fail(CoordinatorLost(reason))

    def progress(self) -> WorkerProgress:
        """See `SessionListener`."""
        return self._progress

    def _fail(self, error: PsError) -> None:
        self._error = self._error or error
        self.news.set()


class DrainOnSigterm:
    """SIGTERM asks for a drain; a second one ends the process at once. Main thread only, else it does nothing."""

    def __init__(self, lifecycle: Lifecycle) -> None:
        self._lifecycle = lifecycle
        self._previous: Handler | int | None = None
        self._installed = False

    def install(self) -> None:
        """Take over SIGTERM, remembering the handler that was there."""
        if threading.current_thread() is not threading.main_thread():
            return
        self._previous = signal.signal(signal.SIGTERM, self._handle)
        self._installed = True

    def restore(self) -> None:
        """Put the previous handler back, if ours is still in place. Idempotent."""
        if not self._installed or threading.current_thread() is not threading.main_thread():
            return
        self._installed = False
        if signal.getsignal(signal.SIGTERM) == self._handle:
            signal.signal(signal.SIGTERM, self._previous)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self._lifecycle.request_drain("SIGTERM"):
            return
        if callable(self._previous):
            self._previous(number, frame)
        else:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)


def goodbye(error: BaseException | None) -> tuple[LeaveReason, int, str]:
    """Reason, exit code and detail of leaving with `error`."""
    if error is None or isinstance(error, WorkerDrained):
        return LeaveReason.DONE, 0, ""
    if isinstance(error, SystemExit):
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
        said = error.code.strip().partition("\n")[0][:500] if isinstance(error.code, str) else ""
        return (LeaveReason.FAILED if code else LeaveReason.DONE), code, (said or f"exit code {code}") if code else ""
    if isinstance(error, KeyboardInterrupt):
        return LeaveReason.FAILED, 130, "interrupted (Ctrl-C)"
    return LeaveReason.FAILED, 1, f"{type(error).__name__}: {error}".splitlines()[0][:500]
