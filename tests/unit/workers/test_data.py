"""`worker.epochs`: each sample once per epoch, whatever happens in the loop."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset, TensorDataset

from ps.alone import LocalJob
from ps.errors import ConfigError, Refused, UnsupportedError
from workers import Worker, WorkerDrained, permutation
from workers.config import WorkerConfig
from workers.loader import source_of
from workers.sources import Data, Loading, length_of


class Squares(Dataset[tuple[int, float]]):
    """A map-style dataset of Python numbers."""

    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> tuple[int, float]:
        return index, float(index * index)


class Doubled(TensorDataset):
    """Looks like a TensorDataset, but changes samples."""

    def __getitem__(self, index: int) -> tuple[Tensor, ...]:
        return tuple(2 * tensor[index] for tensor in self.tensors)


class Endless(IterableDataset[int]):
    """No sample numbers."""

    def __iter__(self) -> Iterator[int]:
        return iter(range(3))


@pytest.fixture
def job() -> LocalJob:
    return LocalJob()


@pytest.fixture
def worker(job: LocalJob) -> Iterator[Worker]:
    with Worker(job.member(), WorkerConfig()) as worker:
        yield worker


def ids(count: int) -> Tensor:
    """A dataset whose samples are their own numbers."""
    return torch.arange(count)


def take(batch: object) -> list[int]:
    assert isinstance(batch, Tensor)
    numbers: list[int] = batch.tolist()
    return numbers


def test_permutation_is_pure_and_differs_by_seed_and_epoch() -> None:
    """A pure function: positions mean the same samples on every worker. The first values are pinned."""
    assert permutation(0, 0, 8).tolist() == permutation(0, 0, 8).tolist() == PINNED
    assert sorted(permutation(3, 1, 100).tolist()) == list(range(100))
    orders = {tuple(permutation(seed, epoch, 50).tolist()) for seed in range(3) for epoch in range(3)}
    assert len(orders) == 9
    state = torch.get_rng_state()
    permutation(1, 1, 9)
    assert torch.equal(state, torch.get_rng_state())


PINNED = [1, 2, 4, 3, 6, 7, 0, 5]


def test_every_sample_once_per_epoch_in_the_seeded_order(worker: Worker) -> None:
    """Alone, an epoch is the permutation in order, cut into batches; epochs are numbered."""
    seen = [(epoch.index, [sample for batch in epoch for sample in take(batch)])
            for epoch in worker.epochs(ids(37), 5, count=3, seed=4)]  # fmt: skip
    assert seen == [(index, permutation(4, index, 37).tolist()) for index in range(3)]


def test_shuffle_false_keeps_the_order(worker: Worker) -> None:
    """Positions are sample ids."""
    (epoch,) = worker.epochs(ids(7), 3, shuffle=False)
    assert [take(batch) for batch in epoch] == [[0, 1, 2], [3, 4, 5, 6]]


@pytest.mark.parametrize(("last", "sizes"), [("merge", [4, 5]), ("short", [4, 4, 1]), ("drop", [4, 4])])
def test_fate_of_a_short_last_batch(job: LocalJob, worker: Worker, last: str, sizes: list[int]) -> None:
    """A batch of one breaks BatchNorm, so by default it is merged; dropped samples count as done."""
    (epoch,) = worker.epochs(ids(9), 4, last=last)
    assert [len(take(batch)) for batch in epoch] == sizes
    assert job.state.data.complete


def test_break_hands_the_rest_back_and_it_comes_again(worker: Worker) -> None:
    """Without a push nothing of a broken-off epoch is done: the next epoch brings it again, before its own."""
    stream = worker.epochs(ids(10), 5, count=2, shuffle=False)
    first = next(stream)
    for batch in first:
        assert take(batch) == [0, 1, 2, 3, 4]
        break
    second = Counter(sample for batch in next(stream) for sample in take(batch))
    assert second == Counter([*range(10), *range(10)])


def test_a_second_worker_gets_what_the_first_left(job: LocalJob, worker: Worker) -> None:
    """An exception in the loop hands the rest back as soon as the worker's block is left."""
    other = Worker(job.member(), WorkerConfig())
    stream = worker.epochs(ids(12), 3, shuffle=False)
    taken: list[int] = []
    with pytest.raises(ZeroDivisionError), other:
        for epoch in other.epochs(ids(12), 3, shuffle=False):
            for batch in epoch:
                taken += take(batch)
                raise ZeroDivisionError
    assert taken == [0, 1, 2]
    with pytest.raises(Exception, match="ZeroDivisionError"):
        list(stream)


def test_streams_must_agree(job: LocalJob, worker: Worker) -> None:
    """The second worker's call with another seed is refused by name: samples would be missed silently."""
    worker.epochs(ids(10), 2, seed=1)
    with Worker(job.member(), WorkerConfig()) as other, pytest.raises(Refused, match="seed=2"):
        other.epochs(ids(10), 2, seed=2)


def test_two_workers_share_every_epoch(job: LocalJob) -> None:
    """Side by side, both together see each sample once per epoch; the last epoch ends for both."""
    workers = [Worker(job.member(), WorkerConfig()) for _ in range(2)]

    def script(worker: Worker) -> list[int]:
        with worker:
            stream = worker.epochs(ids(60), 4, count=2)
            return [sample for epoch in stream for batch in epoch for sample in take(batch)]

    with ThreadPoolExecutor(2) as pool:
        seen = [sample for samples in pool.map(script, workers, timeout=20) for sample in samples]
    # A range that comes back late is seen in a later epoch's loop, so only the counts per sample are fixed.
    assert Counter(seen) == Counter(2 * list(range(60)))


def test_draining_acknowledges_hands_back_and_leaves(job: LocalJob, worker: Worker) -> None:
    """A drain request ends the loop at the next batch; others get everything that was not done."""
    with Worker(job.member(), WorkerConfig()) as other:
        stream = worker.epochs(ids(20), 2)
        for batch in next(other.epochs(ids(20), 2)):
            first = take(batch)
            break
        other.lifecycle.request_drain("test")
        assert other.draining
        with pytest.raises(WorkerDrained) as left:
            other.epochs(ids(20), 2)
            next(other.epochs(ids(20), 2))
        assert left.value.code == 0
        rest = [sample for batch in next(stream) for sample in take(batch)]
        assert sorted(rest) == list(range(20)) and set(first) <= set(rest)


@pytest.mark.parametrize(
    ("data", "length", "batch"),
    [
        (Squares(), 10, [[3, 1], [9.0, 1.0]]),
        (TensorDataset(ids(10), ids(10) + 1), 10, [[3, 1], [4, 2]]),
        ((ids(10), ids(10) + 1), 10, [[3, 1], [4, 2]]),
        (Doubled(ids(10), ids(10) + 1), 10, [[6, 2], [8, 4]]),
        ([(4, 5), (6, 7), (8, 9), (1, 0)], 4, [[1, 6], [0, 7]]),
    ],
)
def test_datasets_collate_as_a_data_loader_would(data: Data, length: int, batch: list[list[float]]) -> None:
    """Tensors are indexed, everything else goes sample by sample, subclasses that change samples included."""
    assert length_of(data) == length
    source = source_of(data, Loading(), 0)
    (piece,) = source.load(iter([torch.tensor([3, 1])]))
    got = piece.batch
    assert isinstance(got, tuple | list)
    assert [part.tolist() for part in got] == batch


@pytest.mark.parametrize(
    ("data", "error", "words"),
    [
        (Endless(), UnsupportedError, "Endless is an IterableDataset"),
        (iter([1]), UnsupportedError, "got list_iterator"),
        ([], ConfigError, "empty"),
        ((ids(2), ids(3)), ConfigError, r"different lengths: \[2, 3\]"),
    ],
)
def test_what_can_not_be_leased_is_refused_by_name(data: Data, error: type[Exception], words: str) -> None:
    """Before anything is told to the coordinator."""
    with pytest.raises(error, match=words):
        length_of(data)


@pytest.mark.parametrize(
    ("wrong", "words"),
    [({"batch_size": 0}, "batch_size=0"), ({"count": 0}, "count=0"), ({"seed": -1}, "seed=-1"), ({"last": "x"}, "'x'")],
)
def test_wrong_arguments_are_named(worker: Worker, wrong: dict[str, object], words: str) -> None:
    """Arguments of `epochs` are checked at the call."""
    arguments: dict[str, object] = {"batch_size": 2, **wrong}
    with pytest.raises(ConfigError, match=words):
        worker.epochs(ids(4), **arguments)  # type: ignore[call-overload]
