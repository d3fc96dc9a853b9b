"""Streams as scripts use them: with and without pushes, one within another, one after another, late, and broken off."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ps.alone import LocalJob
from ps.errors import Refused
from workers import Worker
from workers.config import WorkerConfig


@dataclass
class Script:
    """A worker with a model of one weight, and what it trained on."""

    worker: Worker
    accumulate: int = 1
    model: nn.Linear = field(default_factory=lambda: nn.Linear(1, 1, bias=False))

    def __post_init__(self) -> None:
        self.optimizer: Optimizer = torch.optim.SGD(self.model.parameters(), lr=0.0)
        self.worker.attach(self.model, self.optimizer, accumulate=self.accumulate)

    def backward(self, batch: Tensor) -> None:
        """A forward and a backward pass."""
        loss: Tensor = self.model(batch.float().unsqueeze(1)).mean()
        loss.backward()  # type: ignore[no-untyped-call]

    def train(self, batch: Tensor) -> None:
        """A whole step."""
        self.backward(batch)
        self.optimizer.step()
        self.optimizer.zero_grad()


@pytest.fixture
def job() -> LocalJob:
    return LocalJob()


@pytest.fixture
def worker(job: LocalJob) -> Iterator[Worker]:
    with Worker(job.member(), WorkerConfig()) as worker:
        yield worker


def pushes(job: LocalJob) -> int:
    """Pushes applied by the job's server."""
    (host,) = job.hosts.values()
    return max(shard.pushes for shard in host.progress().shards)


def ids(count: int) -> Tensor:
    return torch.arange(count)


def test_a_step_that_a_scaler_skips_is_done_with_the_next_push(job: LocalJob, worker: Worker) -> None:
    """Batch 1 of 4 overflows and is skipped: not done with the pushes before it, done with the one after it."""
    script = Script(worker)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    done_before, done_at_end = [], 0
    for epoch in worker.epochs(ids(8), 2, shuffle=False):
        for number, batch in enumerate(epoch):
            worker._streams[0].ledger.acknowledge()
            done_before.append(job.state.data.samples)
            factor = float("inf") if number == 1 else 1.0
            scaler.scale(script.model(batch.float().unsqueeze(1)).mean() * factor).backward()
            scaler.step(script.optimizer)
            scaler.update()
            script.optimizer.zero_grad()
        done_at_end = job.state.data.samples
    assert done_before == [0, 2, 2, 6] and done_at_end == 8
    assert pushes(job) == 3


def test_skipped_batches_at_the_end_are_done_with_the_epoch(job: LocalJob, worker: Worker) -> None:
    """`continue` in every batch: nothing is pushed, nothing stays behind, the epoch ends."""
    Script(worker)
    for epoch in worker.epochs(ids(6), 2, 2):
        for _ in epoch:
            assert job.state.data.samples == 6 * epoch.index
            continue
    assert job.state.data.complete


def test_a_worker_that_dies_before_the_push_gives_its_batches_back(job: LocalJob, worker: Worker) -> None:
    """A skipped batch is not done before a push: killed in between, it goes to somebody else."""
    other = Worker(job.member(), WorkerConfig())
    batches = iter(next(other.epochs(ids(6), 2, shuffle=False)))
    Script(other)
    next(batches), next(batches)
    job.event(lambda state, now: state.data.requeue(other._joined.incarnation))
    (epoch,) = worker.epochs(ids(6), 2, shuffle=False)
    assert [batch.tolist() for batch in epoch] == [[0, 1], [2, 3], [4, 5]]
    with pytest.raises(StopIteration):
        next(batches)
    other.close()


def test_an_evaluation_in_the_middle_of_an_accumulation(job: LocalJob, worker: Worker) -> None:
    """A stream within another's epoch neither pushes nor drops what that one has accumulated, broken off or not."""
    script = Script(worker, accumulate=4)
    for epoch in worker.epochs(ids(8), 1):
        for number, batch in enumerate(epoch):
            script.train(batch)
            if number in (1, 5):
                for evaluation in worker.epochs(ids(5), 2):
                    for _ in evaluation:
                        if number == 5:
                            break
                assert worker.micro_batches == 2
    assert pushes(job) == 2 and worker.lifecycle.progress().samples == 8


def test_training_and_evaluation_streams_by_turns(job: LocalJob, worker: Worker) -> None:
    """Batches of an evaluation are done without any push, and are not counted with those of the next one."""
    script = Script(worker)
    for epoch in worker.epochs(ids(6), 3, 2):
        for batch in epoch:
            script.train(batch)
        seen = [sample for rows in worker.epochs(ids(5), 2) for batch in rows for sample in batch.tolist()]
        assert sorted(seen) == [0, 1, 2, 3, 4]
    assert worker.lifecycle.progress().samples == 12
    assert job.state.data.complete


def test_two_streams_side_by_side(job: LocalJob, worker: Worker) -> None:
    """Zipped: a step is made of a batch of each, and both are done with it."""
    script = Script(worker)
    ((left,), (right,)) = worker.epochs(ids(6), 2), worker.epochs(ids(9) + 10, 3)
    for first, second in zip(left, right, strict=True):
        script.train(torch.cat((first, second)))
    assert job.state.data.complete and pushes(job) == 3
    assert worker.lifecycle.progress().samples == 15


def test_a_stream_after_one_that_was_broken_off(job: LocalJob, worker: Worker) -> None:
    """Early stopping: the next stream is whole; the first stays open, for whoever goes on with it."""
    script = Script(worker)
    for epoch in worker.epochs(ids(10), 5, 7):
        for batch in epoch:
            script.train(batch)
            break
        break
    seen = [sample for epoch in worker.epochs(ids(4), 2) for batch in epoch for sample in batch.tolist()]
    assert sorted(seen) == [0, 1, 2, 3]
    assert job.state.data.streams[0].samples == 5 and not job.state.data.complete
    worker.close()
    assert job.state.job.state.value == "finished"  # the worker said that it is done


@pytest.mark.parametrize("size", [4, 3])
def test_no_batch_of_one_unless_asked_for(worker: Worker, size: int) -> None:
    """BatchNorm can't take it: a rest of one is merged."""
    norm = nn.BatchNorm1d(1)
    for epoch in worker.epochs(ids(4 * size + 1), size, count=3):
        sizes = [len(norm(batch.float().unsqueeze(1))) for batch in epoch]
        assert sizes == [size, size, size, size + 1]


def test_an_exception_that_the_script_survives(job: LocalJob, worker: Worker) -> None:
    """The loop is left by an error and the script goes on: the batch comes again."""
    script = Script(worker)
    stream = worker.epochs(ids(6), 3, 2, shuffle=False)
    with pytest.raises(ZeroDivisionError):
        for batch in next(stream):
            script.train(batch)
            if batch[0] == 3:
                raise ZeroDivisionError  # after the push of this batch: it is done
    again = [sample for batch in next(stream) for sample in batch.tolist()]
    assert sorted(again) == list(range(6))
    with pytest.raises(ZeroDivisionError):
        for _ in next(worker.epochs(ids(6), 3)):
            raise ZeroDivisionError
    assert job.state.data.streams[1].samples == 0 and not job.state.data.holders()


def test_a_late_worker_begins_where_work_is_left(job: LocalJob, worker: Worker) -> None:
    """In a stream that is under way at the oldest unfinished epoch, in one that is over at its end."""
    stream = worker.epochs(ids(6), 3, 3)
    for batch in next(stream):
        del batch
    with Worker(job.member(), WorkerConfig()) as late:
        epochs = late.epochs(ids(6), 3, 3)
        assert epochs.next_epoch == 1
        assert [epoch.index for epoch in epochs if list(epoch)] == [1, 2]
        assert list(late.epochs(ids(4), 2, 1)) != []
    assert [epoch.index for epoch in stream if list(epoch)] == []


@pytest.mark.parametrize(
    ("name", "length", "seed", "count", "shuffle"),
    [
        ("length=11", 11, 0, 1, True),
        ("seed=1", 10, 1, 1, True),
        ("epochs=2", 10, 0, 2, True),
        ("shuffle=False", 10, 0, 1, False),
    ],
)
def test_differing_data_is_refused_by_name(
    job: LocalJob, worker: Worker, name: str, length: int, seed: int, count: int, shuffle: bool
) -> None:
    """Each argument that decides which samples there are, and in which order."""
    worker.epochs(ids(10), 2)
    with Worker(job.member(), WorkerConfig()) as other, pytest.raises(Refused, match=f"has {name}, but.* use "):
        other.epochs(ids(length), 2, count, seed, shuffle=shuffle)


def test_a_barrier_holds_the_faster_one(job: LocalJob) -> None:
    """No sample of epoch 1 is handed out before all of epoch 0 are done; without the barrier some are."""
    workers = [Worker(job.member(), WorkerConfig()) for _ in range(2)]
    early: list[int] = []

    def script(worker: Worker) -> list[int]:
        seen: list[int] = []
        with worker:
            for epoch in worker.epochs(ids(20), 2, 2, barrier=True):
                for batch in epoch:
                    if epoch.index == 1 and job.state.data.streams[0].first == 0:
                        early.append(1)
                    seen += batch.tolist()
        return seen

    with ThreadPoolExecutor(2) as pool:
        seen = [sample for samples in pool.map(script, workers, timeout=20) for sample in samples]
    assert Counter(seen) == Counter(2 * list(range(20))) and not early
