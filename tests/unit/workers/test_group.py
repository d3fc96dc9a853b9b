"""Between the ranks of a group: meetings, disagreements, lost ranks, news; parts of batches; spread tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from multiprocessing import Pipe
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor, distributed, nn

from ps.alone import LocalJob
from ps.errors import ConfigError, Fenced, GroupLost, LocalWeightEdit, NonFiniteGradient, PsError, UnsupportedError
from ps.types import JobState, LeaveReason
from workers import WorkerDrained, join
from workers.config import WorkerConfig, load
from workers.group import GroupWorker, _check_reduced
from workers.lifecycle import goodbye
from workers.numbered import NumberedShards
from workers.ranks import Call, End, Ranks
from workers.share import Share
from workers.sources import Loading
from workers.spread import Spread, alike, sample_gradients


class Group:
    """Ranks of one group on threads of their own."""

    def __init__(self, size: int) -> None:
        pipes = [Pipe() for _ in range(size - 1)]
        self.leader = Ranks(0, size, {rank: pipe[0] for rank, pipe in enumerate(pipes, start=1)})
        self.followers = [Ranks(rank, size, {0: pipe[1]}) for rank, pipe in enumerate(pipes, start=1)]
        self.all = [self.leader, *self.followers]
        self.pool = ThreadPoolExecutor(size)

    def each(self, do: Callable[[Ranks], object]) -> list[object]:
        """What each rank gets, or raises, when all do the same at the same time."""
        return self.run([lambda ranks=ranks: do(ranks) for ranks in self.all])  # type: ignore[misc]

    def run(self, scripts: Sequence[Callable[[], object]]) -> list[object]:
        """The same for scripts of their own."""

        def run(script: Callable[[], object]) -> object:
            try:
                return script()
            except BaseException as error:
                return error

        return list(self.pool.map(run, scripts, timeout=10))

    def close(self) -> None:
        for ranks in self.all:
            ranks.close()
        self.pool.shutdown()


@pytest.fixture
def group() -> Iterator[Group]:
    group = Group(3)
    yield group
    group.close()


def fail(error: BaseException) -> Callable[[], object]:
    def act() -> object:
        raise error

    return act


def test_rank_0_acts_once_and_all_get_the_result(group: Group) -> None:
    """Only rank 0's `act` runs, when all are there."""
    acted: list[int] = []

    def do(ranks: Ranks) -> object:
        def act() -> str:
            acted.append(ranks.rank)
            return "done"

        return ranks.together("step()", act)

    assert group.each(do) == ["done"] * 3
    assert acted == [0]


@pytest.mark.parametrize("error", [NonFiniteGradient("inf"), WorkerDrained("asked"), KeyboardInterrupt(), OSError(5)])
def test_what_rank_0_raises_all_raise(group: Group, error: BaseException) -> None:
    """The same type with the same text, with a note of where it comes from; the line stays usable."""
    raised = group.each(lambda ranks: ranks.together("step()", fail(error)))
    assert [type(other) for other in raised] == [type(error)] * 3
    assert [str(other) for other in raised] == [str(error)] * 3
    follower = raised[1]
    assert isinstance(follower, BaseException) and follower.__notes__ == ["raised on rank 0 of the process group"]
    assert group.each(lambda ranks: ranks.together("pull()", lambda: 7)) == [7] * 3


def test_an_error_that_cannot_travel_arrives_as_text(group: Group) -> None:
    """An exception class that pickle can't take becomes a `PsError` that names it; rank 0 raises its own."""

    class Local(Exception):
        pass

    first, *others = group.each(lambda ranks: ranks.together("step()", fail(Local("odd"))))
    assert type(first) is Local
    assert [(type(other), str(other)) for other in others] == [(PsError, "Local: odd")] * 2


def test_a_rank_that_brings_an_error_stops_all_before_anything_is_done(group: Group) -> None:
    """A local edit on a follower: rank 0 does not push, and everybody hears which rank it was."""
    edit = LocalWeightEdit("edited on rank 2")

    def do(ranks: Ranks) -> object:
        return ranks.together("step()", lambda: pytest.fail("acted"), error=edit if ranks.rank == 2 else None)

    raised = group.each(do)
    assert [(type(error), str(error)) for error in raised] == [(LocalWeightEdit, "edited on rank 2")] * 3


def test_ranks_that_do_different_things_are_named(group: Group) -> None:
    """A `pull()` under `if rank == 0` would hang with collectives; here all ranks say what went wrong."""

    def do(ranks: Ranks) -> object:
        return ranks.together("step()" if ranks.rank else "pull()", lambda: pytest.fail("acted"))

    assert {str(error) for error in group.each(do)} == {
        "rank 1 is in step(), and rank 0 in pull(): all ranks of a process group must do the same, in the same order"
    }


def test_other_arguments_are_named(group: Group) -> None:
    """The same call about something else is a disagreement too."""

    def do(ranks: Ranks) -> object:
        return ranks.together("epochs()", lambda: 0, detail="length=8" if ranks.rank < 2 else "length=9")

    assert "rank 2 is in epochs() (length=9), and rank 0 in epochs() (length=8)" in str(group.each(do)[0])


def test_a_lost_rank_is_noticed_by_all(group: Group) -> None:
    """The end of a process closes its line: rank 0 raises, and tells those that wait with it."""
    group.followers[1].close()
    raised = group.run([lambda r=r: r.together("step()", lambda: 0) for r in group.all[:2]])  # type: ignore[misc]
    assert [type(error) for error in raised] == [GroupLost] * 2
    assert "rank 2 of this worker's process group of 3 is gone" in str(raised[1])
    assert group.leader.lost == {2}


def test_followers_notice_the_loss_of_rank_0(group: Group) -> None:
    """Without it nobody can go on."""
    group.leader.close()
    with pytest.raises(GroupLost, match="rank 0 of this worker's process group of 3 is gone"):
        group.followers[0].together("step()", lambda: 0)


def test_a_rank_that_has_left_early_is_named(group: Group) -> None:
    """A follower whose script has ended, or failed, while the others go on."""
    group.followers[0].end("ValueError: bad sample")
    raised = group.run([lambda r=r: r.together("step()", lambda: 0) for r in (group.leader, group.followers[1])])  # type: ignore[misc]
    assert [str(error) for error in raised] == [
        "rank 1 of this worker's process group has failed: ValueError: bad sample, and rank 0 is in step(); a group "
        "goes on only as a whole"
    ] * 2
    assert group.leader.failed == {1: "ValueError: bad sample"}


def test_news_count_from_the_next_meeting_on_for_all(group: Group) -> None:
    """SIGTERM on one rank, and the coordinator's word to rank 0: nobody acts on them before all know."""
    group.followers[1].lifecycle.request_drain("SIGTERM")
    group.leader.lifecycle.on_job(JobState.RUNNING, "", False)
    assert not any(ranks.lifecycle.draining for ranks in group.all)
    group.each(lambda ranks: ranks.together("step()", lambda: 0))
    assert [ranks.lifecycle.drain_reason for ranks in group.all] == ["rank 2: SIGTERM"] * 3
    group.leader.lifecycle.on_fenced("too slow")
    assert not any(ranks.lifecycle.fatal for ranks in group.all)
    group.each(lambda ranks: ranks.together("step()", lambda: 0))
    for ranks in group.all:
        with pytest.raises(Fenced, match="too slow"):
            ranks.lifecycle.check()


def test_rank_0_goes_by_its_own_news_while_it_acts(group: Group) -> None:
    """A push that waits for others ends when the job does; all ranks hear it with the outcome."""

    def act(ranks: Ranks) -> None:
        ranks.lifecycle.on_fenced("gone")
        ranks.lifecycle.check()

    raised = group.each(lambda ranks: ranks.together("step()", lambda: act(ranks)))
    assert [type(error) for error in raised] == [Fenced] * 3


def test_farewell_hears_how_the_others_end(group: Group) -> None:
    """One normally, one with an error that is still to come, and rank 0 waits for it."""
    group.followers[0].end("")
    group.run([lambda: group.leader.farewell(patient=True), lambda: group.followers[1].end("OSError: disk")])
    assert group.leader.failed == {2: "OSError: disk"} and not group.leader.lost


def test_farewell_of_rank_0_answers_those_that_wait(group: Group) -> None:
    """A follower that makes one step more than rank 0 is told, and does not wait for ever."""

    def longer() -> object:
        try:
            return group.followers[0].together("step()", lambda: 0)
        finally:
            group.followers[0].end("PsError")

    group.followers[1].end("")
    _, error = group.run([lambda: group.leader.farewell(patient=True), longer])
    assert str(error).startswith("rank 1 is in step(), and rank 0 has left the job")


@pytest.mark.parametrize(
    ("lost", "failed", "own", "expected"),
    [
        ({}, {}, goodbye(None), (LeaveReason.DONE, 0, "")),
        ({1}, {}, goodbye(GroupLost("x")), (LeaveReason.DRAINED, 0, "lost rank 1 of its process group")),
        ({1}, {2: "RuntimeError: reset"}, goodbye(None), (LeaveReason.DRAINED, 0, "lost rank 1 of its process group")),
        ({}, {1: "OSError: 5"}, goodbye(None), (LeaveReason.FAILED, 1, "rank 1: OSError: 5")),
        ({}, {1: "ValueError: x"}, goodbye(ValueError("x")), (LeaveReason.FAILED, 1, "ValueError: x")),
        (
            {}, {1: "OSError: 5"}, goodbye(RuntimeError("reset")),
            (LeaveReason.FAILED, 1, "RuntimeError: reset; rank 1: OSError: 5"),
        ),
    ],
)  # fmt: skip
def test_how_a_group_leaves(
    lost: set[int],
    failed: dict[int, str],
    own: tuple[LeaveReason, int, str],
    expected: tuple[LeaveReason, int, str],
) -> None:
    """A rank that was killed is no failure of the job, as a worker that was killed is none; a rank that failed is."""
    worker = GroupWorker.__new__(GroupWorker)
    worker._ranks = Ranks(0, 3, {})
    worker._ranks.lost, worker._ranks.failed = set(lost), failed
    assert worker._as_a_whole(*own) == expected


def test_parts_of_a_batch_are_disjoint_and_even() -> None:
    """For any number of ranks and samples: all samples, in order, sizes within one of each other."""
    for ranks in (1, 2, 3, 7):
        for count in range(50):
            parts = [list(range(count))[Share(rank, ranks).of(count)] for rank in range(ranks)]
            assert list(chain(*parts)) == list(range(count))
            sizes = {len(part) for part in parts}
            assert max(sizes) - min(sizes) <= 1 and (min(sizes) > 0) == Share(0, ranks).reaches(count)


def test_every_rank_reads_its_part_of_a_numbered_shard() -> None:
    """Equally many batches on all ranks, each sample on one of them; too few for all ranks are left out."""
    made = [
        NumberedShards(lambda n: range(100 * n, 100 * n + 9), 4, "short", Loading(), Share(rank, 2)) for rank in (0, 1)
    ]
    first, second = (list(source.load(iter([torch.tensor([0, 1])]))) for source in made)
    got = [
        (cast(Tensor, a.batch).tolist(), cast(Tensor, b.batch).tolist())
        for a, b in zip(first, second, strict=True)
        if a.batch is not None
    ]
    assert got == [([0, 1], [2, 3]), ([4, 5], [6, 7]), ([100, 101], [102, 103]), ([104, 105], [106, 107])]
    assert [piece.batch is None for piece in first] == [piece.batch is None for piece in second]
    assert [piece.samples for piece in first] == [4, 4, 1, 4, 4, 1] and [p.ends for p in first] == [
        False,
        False,
        True,
    ] * 2


def test_gradients_of_their_own_are_refused_by_name() -> None:
    """Ranks that nobody has reduced for would each have pushed other numbers."""
    with pytest.raises(UnsupportedError) as caught:
        _check_reduced((1.0, 2.0), {1: Call("step()", sample=(1.0, 2.0)), 2: Call("step()", sample=(1.0, -2.0))})
    assert str(caught.value) == (
        "step() in a process group: the gradients of rank 2 are not those of rank 0, so nothing has reduced them. Run "
        "the model through DistributedDataParallel(model), or average gradients with all_reduce before step(); and "
        "leave no_sync() before the last backward. Nothing was sent"
    )


def test_samples_of_gradients() -> None:
    """Strided, empty, missing, sparse and complex gradients; other elements at each turn, in time all of them."""
    params = [nn.Parameter(torch.zeros(shape)) for shape in ((3, 5), (40,), (0,), (2,), ())]
    params[0].grad = torch.arange(15.0).reshape(5, 3).t()
    params[1].grad = torch.arange(40.0)
    params[2].grad = torch.zeros(0)
    params[4].grad = torch.tensor(7.0)
    sparse = nn.Parameter(torch.zeros(4))
    sparse.grad = torch.ones(4).to_sparse()
    waves = nn.Parameter(torch.zeros(2, dtype=torch.complex64))
    waves.grad = torch.tensor([3 + 4j, 0])
    everything = [*params, sparse, waves]
    drawn = [sample_gradients(everything, turn) for turn in range(40)]
    assert {len(sample) for sample in drawn} == {16 * 8}
    assert set().union(*map(set, drawn)) >= {*map(float, range(40)), 7.0}
    assert drawn[0] == sample_gradients(everything, 0) and drawn[0] != drawn[1]


@pytest.mark.parametrize(
    ("one", "other", "expected"),
    [
        ((1.0, 0.0), (1.0, 0.0), True),
        ((1.0, 1e-9), (1.001, -1e-9), True),
        ((1.0, 0.5), (1.0, 0.4), False),
        ((float("nan"), 1.0), (float("nan"), 1.0), True),
        ((float("inf"), 1.0), (1.0, 1.0), False),
        ((), (), True),
        ((1.0,), (), False),
    ],
)
def test_alike(one: tuple[float, ...], other: tuple[float, ...], expected: bool) -> None:
    """Rounding of other machines passes, other gradients don't; inf and NaN are the worker's own to judge."""
    assert alike(one, other) is expected


@pytest.fixture
def process_group(tmp_path: Path) -> Iterator[None]:
    """A group of this process alone."""
    distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


def test_spread_writes_through_in_every_dtype(process_group: None) -> None:
    """What rank 0 packs is what another unpacks: any dtype, stride and size, version counters move there only."""
    torch.manual_seed(0)
    tensors: list[Tensor] = [
        torch.randn(3, 5), torch.randn(7, 4).t(), torch.tensor(2.5, dtype=torch.float64), torch.zeros(0),
        torch.randn(5, dtype=torch.complex128), torch.randn(9).bfloat16(), torch.arange(3), torch.tensor([True]),
        torch.randn(2, 3, 4, 4).contiguous(memory_format=torch.channels_last),
    ]  # fmt: skip
    spread = Spread(None)
    spread(tensors, leads=True)
    assert {tensor._version for tensor in tensors} == {0}
    copies = [torch.zeros_like(tensor) for tensor in tensors]
    before = [copy._version for copy in copies]
    packed = next(iter(spread._buffers.values()))
    assert packed.numel() % 16 == 0
    spread(copies, leads=False)
    assert all(torch.equal(copy, tensor) for copy, tensor in zip(copies, tensors, strict=True))
    moved = [copy._version > version for copy, version in zip(copies, before, strict=True)]
    assert moved == [bool(tensor.numel()) for tensor in tensors]


def test_join_before_init_process_group_names_the_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """Under torchrun each process would become a worker of its own, with an N-th of the batch it was meant to have."""
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match=r"join\(\) was called before init_process_group\(\), in one of 2 processes"):
        join()


def test_what_torchrun_says() -> None:
    """Only with RANK beside it is WORLD_SIZE torchrun's; nonsense of others is none of our business."""
    assert load(env={"WORLD_SIZE": "4"}).launched_ranks == 1
    assert load(env={"WORLD_SIZE": "all", "RANK": "0"}).launched_ranks == 1
    found = load(env={"WORLD_SIZE": "4", "RANK": "3", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "10.0.0.7"})
    assert (found.launched_ranks, found.launched_here, found.launched_at) == (4, 2, "10.0.0.7")
    assert WorkerConfig().launched_ranks == 1


def test_a_process_group_of_one_is_a_plain_worker(process_group: None) -> None:
    """`torchrun --nproc-per-node 1` changes nothing."""
    with join() as worker:
        assert not isinstance(worker, GroupWorker) and worker.alone


def test_records_of_the_line_print_and_travel() -> None:
    """They are plain data."""
    assert "step()" in repr(Call("step()")) and End("") == End("")


def epochs_of(group: Group, job: LocalJob, count: int, batch_size: int, **options: Any) -> list[list[list[int]]]:
    """Batches of each rank of a group without a model, over one epoch."""

    def script(ranks: Ranks) -> list[list[int]]:
        with GroupWorker(ranks, job.member() if ranks.leads else None, WorkerConfig()) as worker:
            stream = worker.epochs(torch.arange(count), batch_size, shuffle=False, **options)
            return [batch.tolist() for epoch in stream for batch in epoch]

    return cast("list[list[list[int]]]", group.each(script))


@pytest.mark.parametrize(
    ("count", "batch_size", "last", "sizes", "left_out"),
    [
        (24, 4, "merge", [12, 12], 0),
        (26, 4, "merge", [12, 14], 0),
        (26, 4, "short", [12, 12], 2),
        (28, 4, "short", [12, 12, 4], 0),
        (26, 4, "drop", [12, 12], 2),
        (5, 1, "short", [3], 2),
        (2, 4, "merge", [], 2),
    ],
)
def test_all_ranks_have_equally_many_batches(
    group: Group, count: int, batch_size: int, last: str, sizes: list[int], left_out: int
) -> None:
    """One batch more on one rank would hang DDP. Each sample is on one rank; those left out count as done."""
    job = LocalJob()
    ranks = epochs_of(group, job, count, batch_size, last=last)
    assert [sum(map(len, parts)) for parts in zip(*ranks, strict=True)] == sizes
    assert all(max(map(len, parts)) - min(map(len, parts)) <= 1 for parts in zip(*ranks, strict=True))
    seen = sorted(sample for batches in ranks for batch in batches for sample in batch)
    assert seen == list(range(count - left_out))
    assert job.state.data.complete
