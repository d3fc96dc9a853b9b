"""Numbered shards of iterable data: leased whole, exactly once, done when all their batches are."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor, nn

from ps.alone import LocalJob
from ps.errors import ConfigError, UnsupportedError
from workers import Worker
from workers.config import WorkerConfig
from workers.numbered import cut_samples

SHARDS = 7


def shard(number: int) -> Iterator[int]:
    """Shard n has n samples: 10 n, 10 n + 1, ...; shard 0 is empty."""
    return iter(range(10 * number, 11 * number))


def batch(samples: list[int]) -> list[int]:
    return samples


@pytest.fixture
def job() -> LocalJob:
    return LocalJob()


@pytest.fixture
def worker(job: LocalJob) -> Iterator[Worker]:
    with Worker(job.member(), WorkerConfig()) as worker:
        yield worker


@pytest.mark.parametrize(
    ("count", "last", "expected"),
    [
        (0, "merge", []),
        (1, "merge", [1]),
        (8, "merge", [4, 4]),
        (9, "merge", [4, 5]),
        (10, "merge", [4, 4, 2]),  # half a batch is a batch
        (9, "short", [4, 4, 1]),
        (9, "drop", [4, 4]),
        (3, "drop", []),
    ],
)
def test_batches_of_a_shard(count: int, last: str, expected: list[int]) -> None:
    """`last` is about each shard's last batch; the last one is known as such; order is kept."""
    cut = list(cut_samples(iter(range(count)), 4, last))
    assert [len(samples) for samples, _ in cut] == expected
    assert [sample for samples, _ in cut for sample in samples] == list(range(sum(expected)))
    assert [ends for _, ends in cut] == [False] * (len(cut) - 1) + [True] * bool(cut)


def test_every_shard_once_per_epoch(worker: Worker, job: LocalJob) -> None:
    """In the order of the permutation, batches of one shard only; empty shards are done, too."""
    stream = worker.epochs(shard, 2, 2, 3, "short", shards=SHARDS, collate_fn=batch)
    for epoch in stream:
        batches = list(epoch)
        assert Counter(sample for samples in batches for sample in samples) == Counter(
            sample for number in range(SHARDS) for sample in shard(number)
        )
        assert all(len({sample // 10 for sample in samples}) == 1 for samples in batches)
    assert job.state.data.complete


def test_two_workers_share_the_shards(job: LocalJob) -> None:
    """Each shard goes to one of them."""

    def script(worker: Worker) -> list[int]:
        with worker:
            stream = worker.epochs(shard, 2, shards=SHARDS, collate_fn=batch)
            return [sample for epoch in stream for samples in epoch for sample in samples]

    workers = [Worker(job.member(), WorkerConfig()) for _ in range(2)]
    with ThreadPoolExecutor(2) as pool:
        seen = [sample for samples in pool.map(script, workers, timeout=20) for sample in samples]
    assert Counter(seen) == Counter(sample for number in range(SHARDS) for sample in shard(number))


def test_samples_are_collated_like_a_loader_would(worker: Worker) -> None:
    """Without a collate function tensors come stacked."""
    (epoch,) = worker.epochs(lambda number: [torch.tensor(float(number))] * 2, 2, shards=2, shuffle=False)
    assert [samples.tolist() for samples in epoch] == [[0.0, 0.0], [1.0, 1.0]]


def test_a_shard_is_done_when_its_last_batch_is_pushed(worker: Worker, job: LocalJob) -> None:
    """Not with the first: whoever breaks off inside hands back all of it; one that is done stays done."""
    model = nn.Linear(1, 1)
    optimizer = worker.attach(model, torch.optim.SGD(model.parameters(), lr=0.1))
    stream = worker.epochs(lambda number: torch.ones(3, 1), 1, 2, shards=2, last="short")
    for number, x in enumerate(next(stream)):
        model(x).sum().backward()
        optimizer.step()
        if number == 4:
            break
    assert job.state.data.samples == 1 and not job.state.data.holders()
    assert sum(1 for _ in next(stream)) == 3 + 2 * 3


def test_pushes_count_samples_not_shards(worker: Worker) -> None:
    """The servers hear how many samples a gradient is made of."""
    model = nn.Linear(1, 1)
    optimizer = worker.attach(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for epoch in worker.epochs(lambda number: torch.ones(5, 1), 4, shards=2, last="short"):
        for x in epoch:
            model(x).sum().backward()
            optimizer.step()
    assert worker.lifecycle.progress().samples == 10


def test_what_is_no_shard_is_refused_by_name(worker: Worker) -> None:
    """Each says what to do instead."""
    with pytest.raises(ConfigError, match=r"shards=2\) takes a function .* got Tensor; leave shards= out"):
        worker.epochs(torch.ones(3), 1, shards=2)  # type: ignore[call-overload]
    with pytest.raises(ConfigError, match=r"shards=0\) must be at least 1"):
        worker.epochs(shard, 1, shards=0)
    with pytest.raises(UnsupportedError, match=r"function; a function that makes numbered shards needs shards=K"):
        worker.epochs(shard, 1)  # type: ignore[call-overload]
    with pytest.raises(UnsupportedError, match=r"num_workers=2\).*DataLoader\(\.\.\., batch_size=None, num_workers="):
        worker.epochs(shard, 1, shards=2, num_workers=2)


def test_types_of_batches(worker: Worker) -> None:
    """mypy: tensors give tensors, tuples of tensors tuples of tensors, collate functions what they return."""
    x: Tensor
    y: Tensor
    rows = torch.arange(4)
    for epoch in worker.epochs((rows, rows + 1), 2):
        for x, y in epoch:
            assert torch.equal(x + 1, y)
    for single in worker.epochs(rows, 2):
        for x in single:
            assert x.shape == (2,)
    for lists in worker.epochs([1, 2], 2, collate_fn=batch):
        numbers: list[int]
        for numbers in lists:
            assert sorted(numbers) == [1, 2]
