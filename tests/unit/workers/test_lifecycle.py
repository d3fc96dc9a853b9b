"""What may end a worker, and how its script hears of it."""

from __future__ import annotations

import os
import pickle
import signal
from collections.abc import Iterator

import pytest
from torch import nn
from torch.optim import SGD

from ps.alone import LocalJob
from ps.clock import MonotonicClock
from ps.errors import CoordinatorLost, Fenced, ForkedProcess, JobFailed, PsError
from ps.types import JobState, LeaveReason, MemberState
from workers import Worker, WorkerDrained, WorkerStopped
from workers.config import WorkerConfig
from workers.lifecycle import Lifecycle


@pytest.fixture
def job() -> LocalJob:
    return LocalJob()


@pytest.fixture
def previous() -> Iterator[list[int]]:
    """A SIGTERM handler of the user's, installed before the worker joins."""
    calls: list[int] = []
    old = signal.signal(signal.SIGTERM, lambda number, frame: calls.append(number))
    yield calls
    signal.signal(signal.SIGTERM, old)


def join(job: LocalJob) -> Worker:
    return Worker(job.member(), WorkerConfig())


def reason_of(job: LocalJob, worker: Worker) -> tuple[MemberState, str]:
    member = next(member for member in job.state.members if member.name == worker.name)
    return member.state, member.reason


@pytest.mark.parametrize(
    ("state", "error", "code"),
    [
        (JobState.FAILED, JobFailed, None),
        (JobState.INTERRUPTED, WorkerStopped, 130),
        (JobState.FINISHED, WorkerStopped, 0),
    ],
)
def test_end_of_the_job_by_others(state: JobState, error: type[BaseException], code: int | None) -> None:
    """A failed job is an error, an interrupted one an exit with 130; both name the reason."""
    lifecycle = Lifecycle()
    lifecycle.on_job(JobState.RUNNING, "", False)
    lifecycle.check()
    lifecycle.on_job(state, "because", False)
    with pytest.raises(error) as raised:
        lifecycle.check()
    assert getattr(raised.value, "code", None) == code
    assert "because" in (str(raised.value) if code is None else getattr(raised.value, "reason", ""))
    assert lifecycle.news.is_set() and lifecycle.fatal


def test_a_goodbye_is_said_after_the_end_of_the_job(job: LocalJob) -> None:
    """The coordinator stays until all have left: without a goodbye it would wait for this worker's lease to expire."""
    worker = join(job)
    job.state.stop(MonotonicClock().now(), interrupted=False, reason="because")
    worker.lifecycle.on_job(JobState.FAILED, "because", False)
    with pytest.raises(JobFailed), worker:
        worker.lifecycle.check()
    assert reason_of(job, worker)[0] is MemberState.LEFT


def test_eviction_and_a_lost_coordinator_are_raised_and_wake_waits() -> None:
    """The first fatal piece of news counts."""
    fenced, lost = Lifecycle(), Lifecycle()
    fenced.on_fenced("lease expired")
    fenced.on_lost("too late")
    lost.on_lost("no coordinator for 30 s")
    with pytest.raises(Fenced, match="lease expired"):
        fenced.check()
    with pytest.raises(CoordinatorLost, match="30 s"):
        lost.check()
    assert fenced.news.is_set() and lost.news.is_set()


def test_sigterm_drains_and_the_second_goes_to_the_previous_handler(job: LocalJob, previous: list[int]) -> None:
    """The first SIGTERM only asks; the second is not ours any more; closing restores the handler."""
    before = signal.getsignal(signal.SIGTERM)
    with join(job) as worker:
        os.kill(os.getpid(), signal.SIGTERM)
        assert worker.draining and previous == []
        os.kill(os.getpid(), signal.SIGTERM)
        assert previous == [signal.SIGTERM]
    assert signal.getsignal(signal.SIGTERM) is before


def test_draining_ends_the_loop_and_leaves(job: LocalJob) -> None:
    """`WorkerDrained` is an exit with code 0, the coordinator hears DRAINED, later calls say so."""
    with join(job), pytest.raises(WorkerDrained) as raised, join(job) as worker:
        for epoch in worker.epochs([1, 2, 3, 4], 2):
            for _ in epoch:
                worker.lifecycle.request_drain("test")
    assert raised.value.code == 0
    assert reason_of(job, worker) == (MemberState.LEFT, "drained: test")
    with pytest.raises(PsError, match="has left the job"):
        worker.report(x=1)


@pytest.mark.parametrize(
    ("error", "state", "reason"),
    [
        (None, JobState.FINISHED, "done"),
        (SystemExit(0), JobState.FINISHED, "done"),
        (ValueError("bad\nshape"), JobState.FAILED, "failed: ValueError: bad"),
        (SystemExit(3), JobState.FAILED, "failed: exit code 3"),
        (SystemExit("no data\nhere"), JobState.FAILED, "failed: no data"),
        (KeyboardInterrupt(), JobState.FAILED, "failed: interrupted (Ctrl-C)"),
    ],
)
def test_how_a_script_ends_is_said(job: LocalJob, error: BaseException | None, state: JobState, reason: str) -> None:
    """An exception inside `with worker:` is a failure of the job, a normal end or exit 0 is not."""
    worker = join(job)
    try:
        with worker:
            if error is not None:
                raise error
    except BaseException as raised:
        assert raised is error
    assert job.state.job.state is state
    assert reason_of(job, worker) == (MemberState.LEFT, reason)


def test_failure_carries_the_exit_code(job: LocalJob) -> None:
    """The launcher exits with the first failing script's code."""
    with pytest.raises(SystemExit), join(job):
        raise SystemExit(3)
    assert job.state.job.record.exit_code == 3


def test_close_is_idempotent_and_says_done_once(job: LocalJob) -> None:
    """Closing twice, or after `with`, does nothing more."""
    with join(job) as worker:
        pass
    worker.close()
    assert reason_of(job, worker)[1] == LeaveReason.DONE.value


def test_a_worker_is_not_picklable(job: LocalJob) -> None:
    """A DataLoader that would ship the worker to its processes gets a sentence, not a lock error."""
    with join(job) as worker, pytest.raises(TypeError, match="place in the job"):
        pickle.dumps(worker)


def test_a_forked_child_gets_an_error(job: LocalJob, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every public method raises in a child: RPC and gRPC hang there. (The pid is faked.)"""
    with join(job) as worker:
        parent = os.getpid()
        monkeypatch.setattr(os, "getpid", lambda: parent + 1)
        model = nn.Linear(1, 1)
        for call in (
            lambda: worker.epochs([1], 1),
            lambda: worker.report(x=1),
            worker.pull,
            worker.close,
            lambda: worker.attach(model, SGD(model.parameters(), lr=0.1)),
        ):
            with pytest.raises(ForkedProcess, match="forked child"):
                call()
        monkeypatch.undo()


def test_names_and_numbers(job: LocalJob) -> None:
    """A given name is kept; reported numbers arrive as floats."""
    with Worker(job.member(), WorkerConfig(name="ada")) as worker:
        assert worker.name == "ada" and worker.alone and worker.global_step == 0
        worker.report(accuracy=1)
    assert job.state.numbers == {"accuracy": 1.0}


def test_pull_before_attach_is_refused(job: LocalJob) -> None:
    """There is no model to pull into."""
    with join(job) as worker, pytest.raises(PsError, match="pull"):
        worker.pull()
