"""Life of the job: waiting, running, and the rules by which it ends.

Completion is decided by data and by scripts that ran to their end, never by counting processes that went away.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from ps.control.records import JobRecord, Options, Record
from ps.types import JobState


@dataclass(frozen=True, slots=True, kw_only=True)
class Workers:
    """What the end of a job depends on."""

    present: int
    """Workers that have not ended, joining ones included."""
    may_come: bool
    """Whether a process may still follow one of those that ended."""
    streams: int
    """Data streams opened."""
    data_complete: bool
    samples: int
    samples_expected: int


class Job:
    """State of the job. Not thread-safe; time comes in as an argument."""

    def __init__(self, now: float, record: JobRecord, options: Options, emit: Callable[[Record], None]) -> None:
        self._options = options
        self._emit = emit
        self._record = record
        self._resumed_at = now if record.state is JobState.RUNNING else None
        self._no_workers_since: float | None = now if record.workers_seen else None
        self.version = 1
        """Rises with every change that members have to hear of."""
        self.workers_lost = 0
        """Worker processes that ended for good before they were live."""

    @property
    def record(self) -> JobRecord:
        """What the journal keeps."""
        return self._record

    @property
    def state(self) -> JobState:
        """The job's state."""
        return self._record.state

    @property
    def over(self) -> bool:
        """Finished, failed or interrupted."""
        return self._record.state.over

    def elapsed_s(self, now: float) -> float:
        """Training time: since the job began to run, without the time that the coordinator was down."""
        return self._record.elapsed_s + (0.0 if self._resumed_at is None else now - self._resumed_at)

    def run(self, now: float) -> None:
        """Training begins."""
        if self._record.state is JobState.WAITING:
            self._resumed_at = now
            self._change(state=JobState.RUNNING)

    def end(self, now: float, state: JobState, reason: str, exit_code: int = 0) -> None:
        """The job is over; the first end counts."""
        assert state.over
        if self.over:
            return
        elapsed_s, self._resumed_at = self.elapsed_s(now), None
        released = not self._options.hold
        self._change(state=state, reason=reason, exit_code=exit_code, elapsed_s=elapsed_s, released=released)

    def release(self) -> None:
        """Results are saved: servers and observers may exit."""
        if not self._record.released:
            self._change(released=True)

    def worker_live(self) -> None:
        """A worker became live."""
        self._note(workers_seen=self._record.workers_seen + 1)
        self.open_gate()

    def worker_lost(self) -> None:
        """A worker process ended for good before it was live: nobody needs to wait for it."""
        self.workers_lost += 1
        self.open_gate()

    def open_gate(self) -> None:
        """Hand out data from now on, if enough workers have come."""
        if not self._record.gate_open and self._record.workers_seen + self.workers_lost >= self._options.min_workers:
            self._note(gate_open=True)

    def worker_ended(self, *, done: bool) -> None:
        """A worker that counts left or died."""
        record = self._record
        self._note(workers_done=record.workers_done + done, workers_undone=record.workers_undone + (not done))

    def check(self, now: float, workers: Workers) -> None:
        """End the job when a rule says so."""
        if self.over:
            return
        if workers.present:
            self._no_workers_since = None
            return
        if self._no_workers_since is None:
            if not self._record.workers_done + self._record.workers_undone + self.workers_lost:
                return  # nobody has come yet: any start order is fine, for as long as it takes
            self._no_workers_since = now
        ended = self._verdict(now - self._no_workers_since, workers)
        if ended is not None:
            self.end(now, *ended)

    def _verdict(self, idle_s: float, workers: Workers) -> tuple[JobState, str] | None:
        record, options = self._record, self._options
        all_came = max(record.workers_seen, record.workers_done) + self.workers_lost >= options.min_workers
        if record.workers_done and all_came:
            if workers.streams and workers.data_complete:
                return JobState.FINISHED, "all data is processed and all workers have left"
            if not workers.streams or not record.workers_undone:
                return JobState.FINISHED, "every worker's script has ended"
        left = f"{workers.samples} of {workers.samples_expected} samples done" if workers.streams else "no script ended"
        if all_came and not workers.may_come:
            return JobState.FAILED, f"the last worker is gone and none will follow; {left}"
        if idle_s >= options.no_workers_s:
            return JobState.FAILED, f"no worker for {options.no_workers_s:g} s (no_workers_s); {left}"
        return None

    def _change(self, **fields: object) -> None:
        self._note(**fields)
        self.version += 1

    def _note(self, **fields: object) -> None:
        self._record = replace(self._record, **fields)  # type: ignore[arg-type]  # names are JobRecord's
        self._emit(self._record)
