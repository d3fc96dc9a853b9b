"""Data streams: how ranges are cut, sized, acknowledged and given back."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ps.control.api import DataRange, Lease, LeaseVerdict
from ps.control.data_shards import Cut, DataShards, Spans, cut
from ps.errors import Refused, WireError
from ps.types import Incarnation
from tests.support.control import ask, stream

A, B = Incarnation(1), Incarnation(2)


def opened(*, length: int = 100, epochs: int = 1) -> DataShards:
    data = DataShards(lambda part, whole: None)
    data.open(stream(length=length, epochs=epochs))
    return data


def bounds(lease: Lease) -> tuple[int, int, int]:
    assert lease.range is not None, lease
    return lease.range.epoch, lease.range.begin, lease.range.end


def part(begin: int, end: int, epoch: int = 0) -> DataRange:
    return DataRange(stream=0, epoch=epoch, begin=begin, end=end)


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 30), st.integers(0, 30)), max_size=20))
def test_spans_equal_a_set_of_integers(operations: list[tuple[bool, int, int]]) -> None:
    """Spans add, remove and count as the plain set does, and stay sorted, disjoint and merged."""
    spans, plain = Spans(), set[int]()
    for is_add, begin, end in operations:
        if is_add:
            spans.add(begin, end)
            plain |= set(range(begin, end))
        else:
            removed = {i for b, e in spans.remove(begin, end) for i in range(b, e)}
            assert removed == plain & set(range(begin, end))
            plain -= removed
        assert {i for b, e in spans for i in range(b, e)} == plain
        assert spans.total == len(plain)
        listed = list(spans)
        assert all(b < e for b, e in listed)
        assert all(left[1] < right[0] for left, right in pairwise(listed))


@pytest.mark.parametrize(
    ("begin", "end", "is_tail", "last", "batches", "expected"),
    [
        (0, 100, True, "merge", 4, Cut(end=40, sizes=(10,) * 4)),
        (60, 100, True, "merge", 4, Cut(end=100, sizes=(10,) * 4)),
        (60, 104, True, "merge", 4, Cut(end=104, sizes=(10, 10, 10, 14))),  # 4 < 10 / 2: into the batch before
        (60, 105, True, "merge", 4, Cut(end=100, sizes=(10,) * 4)),  # 5 stays, a short batch for the next asker
        (100, 105, True, "merge", 4, Cut(end=105, sizes=(5,))),
        (100, 103, True, "merge", 4, Cut(end=103, sizes=(3,))),  # nothing before it to merge with
        (60, 103, True, "short", 9, Cut(end=103, sizes=(10, 10, 10, 10, 3))),
        (60, 103, True, "drop", 9, Cut(end=103, sizes=(10,) * 4, dropped=3)),
        (100, 103, True, "drop", 9, Cut(end=103, sizes=(), dropped=3)),
        (60, 93, False, "drop", 9, Cut(end=93, sizes=(10, 10, 10, 3))),  # only an epoch's tail is dropped
        (60, 94, False, "merge", 9, Cut(end=94, sizes=(10, 10, 14))),
    ],
)
def test_cut(begin: int, end: int, is_tail: bool, last: str, batches: int, expected: Cut) -> None:
    """Ranges are whole batches but for an epoch's tail, which is merged, short or dropped."""
    assert cut(begin, end, is_tail=is_tail, ask=ask(last=last), batches=batches) == expected


def test_ranges_shrink_near_the_end_of_an_epoch() -> None:
    """With two workers, nobody gets more than a quarter of what is left, and at least one batch."""
    data, sizes = opened(length=400), []
    while (lease := data.lease(A, ask(batches=100), workers=2, now=0.0)).range is not None:
        sizes.append(len(lease.batch_sizes))
    assert sizes == [10, 7, 5, 4, 3, 2, 2, 1, 1, 1, 1, 1, 1, 1]
    assert sum(sizes) == 40


def test_returned_ranges_go_out_first_and_to_workers_of_later_epochs_too() -> None:
    """What a holder gave back of an old epoch is leased to a worker that is past it."""
    data = opened(length=40, epochs=2)
    data.lease(A, ask(batches=4), workers=1, now=0.0)
    data.lease(A, ask(batches=4), workers=1, now=0.0)
    _, begin, end = bounds(data.lease(B, ask(batches=4), workers=1, now=0.0))
    data.give_back(A, part(10, 20))
    assert bounds(data.lease(B, ask(epoch=1), workers=1, now=0.0)) == (0, 10, 20)
    assert (begin, end) == (30, 40)


def test_a_worker_can_only_give_back_what_it_holds() -> None:
    """A range that somebody else holds, or that is done, is not requeued by a stranger."""
    data = opened()
    data.lease(A, ask(batches=1), workers=1, now=0.0)
    data.give_back(B, part(0, 100))
    data.validate()
    assert bounds(data.lease(B, ask(batches=1), workers=1, now=0.0)) == (0, 10, 20)


def test_last_epoch_waits_for_others_and_then_ends() -> None:
    """In the last epoch a worker without a range waits while others hold some, then hears the end of the stream."""
    data = opened(length=20)
    first, second = data.lease(A, ask(batches=1), workers=1, now=0.0), data.lease(B, ask(batches=1), workers=1, now=0.0)
    assert data.lease(A, ask(), workers=2, now=0.0).verdict is LeaseVerdict.WAIT
    for lease in (first, second):
        assert lease.range is not None
        data.finish(lease.range)
    assert data.lease(A, ask(), workers=2, now=0.0).verdict is LeaseVerdict.STREAM_END


def test_middle_epoch_ends_at_once_or_waits_with_a_barrier() -> None:
    """Without a barrier a worker goes on to the next epoch while others still hold ranges of this one."""
    data = opened(length=10, epochs=2)
    data.lease(A, ask(), workers=1, now=0.0)
    assert data.lease(B, ask(), workers=2, now=0.0).verdict is LeaseVerdict.EPOCH_END
    assert data.lease(B, ask(barrier=True), workers=2, now=0.0).verdict is LeaseVerdict.WAIT
    data.finish(part(0, 10))
    assert data.lease(B, ask(barrier=True), workers=2, now=0.0).verdict is LeaseVerdict.EPOCH_END


def test_nobody_waits_for_itself() -> None:
    """The only holder of unacknowledged ranges hears the end of the epoch: waiting for its own would be for ever."""
    data = opened(length=10)
    data.lease(A, ask(), workers=1, now=0.0)
    assert data.lease(A, ask(), workers=1, now=0.0).verdict is LeaseVerdict.EPOCH_END


def test_a_dropped_tail_counts_as_acknowledged() -> None:
    """With last="drop" an epoch of 25 samples is complete after two batches of 10."""
    done: list[tuple[DataRange, bool]] = []
    data = DataShards(lambda part, whole: done.append((part, whole)))
    data.open(stream(length=25))
    for _ in range(2):
        lease = data.lease(A, ask(batches=1, last="drop"), workers=1, now=0.0)
        assert lease.range is not None
        data.finish(lease.range)
    assert data.lease(A, ask(last="drop"), workers=1, now=0.0).verdict is LeaseVerdict.STREAM_END
    assert data.samples == 25
    assert [whole for _, whole in done] == [False, False, True]


def test_acknowledging_again_counts_once() -> None:
    """A retried acknowledgement changes nothing; neither does one of an epoch that is complete."""
    data = opened(length=20)
    lease = data.lease(A, ask(batches=1), workers=1, now=0.0)
    assert lease.range is not None
    for _ in range(2):
        data.finish(lease.range)
    assert data.samples == 10
    data.finish(part(10, 20))
    data.finish(part(0, 20))
    assert data.samples == 20
    assert data.complete


def test_a_dead_holders_ranges_come_back() -> None:
    """Only the samples that were not acknowledged are requeued."""
    data = opened(length=40)
    data.lease(A, ask(batches=4), workers=0, now=0.0)
    data.lease(A, ask(batches=4), workers=0, now=0.0)
    data.finish(part(0, 10))
    assert data.requeue(A) == 20
    assert bounds(data.lease(B, ask(batches=4), workers=1, now=0.0)) == (0, 10, 20)
    data.validate()


def test_streams_must_agree() -> None:
    """A worker whose epochs() call differs is refused by the name of what differs; so is a skipped number."""
    data = opened(length=100)
    assert data.open(stream(length=100)) == (0, False)
    with pytest.raises(Refused, match="length=99, but the job's other workers use 100"):
        data.open(stream(length=99))
    with pytest.raises(Refused, match="seed=5"):
        data.open(stream(length=100, seed=5))
    with pytest.raises(WireError, match="the next one is 1"):
        data.open(stream(number=2))


def test_opening_late_gives_the_oldest_unfinished_epoch() -> None:
    """A newcomer begins where work is left; in a stream that has ended it gets the number of epochs."""
    data = opened(length=10, epochs=2)
    data.finish(part(0, 10, epoch=0))
    assert data.open(stream(length=10, epochs=2)) == (1, False)
    data.finish(part(0, 10, epoch=1))
    assert data.open(stream(length=10, epochs=2)) == (2, False)


def test_empty_streams_are_complete() -> None:
    """No samples or no epochs: the end at once."""
    for spec in (stream(length=0), stream(epochs=0)):
        data = DataShards(lambda part, whole: None)
        data.open(spec)
        assert data.complete
        assert data.lease(A, ask(), workers=1, now=0.0).verdict is LeaseVerdict.STREAM_END
        data.validate()


@pytest.mark.parametrize(
    "wrong", [part(0, 101), part(5, 5), part(7, 3), part(0, 10, epoch=1), DataRange(stream=1, epoch=0, begin=0, end=1)]
)
def test_ranges_out_of_bounds_are_refused(wrong: DataRange) -> None:
    """Whatever is outside of its stream is a `WireError` and changes nothing."""
    data = opened()
    with pytest.raises(WireError):
        data.finish(wrong)
    with pytest.raises(WireError):
        data.give_back(A, wrong)
    assert data.samples == 0
    data.validate()


def test_impossible_asks_are_refused() -> None:
    """Batches of 0 samples, an unknown `last` and a stream that is not open."""
    data = opened()
    for wrong in (ask(batch_size=0), ask(batches=0), ask(last="keep")):
        with pytest.raises(WireError):
            data.lease(A, wrong, workers=1, now=0.0)
    with pytest.raises(WireError, match="not open"):
        DataShards(lambda part, whole: None).lease(A, ask(), workers=1, now=0.0)


def test_what_is_fetched_ahead_comes_in_order() -> None:
    """A worker that holds a batch gets no second one near an epoch's end, and none of the next epoch instead."""
    data = opened(length=30, epochs=2)
    assert bounds(data.lease(A, ask(batches=1), workers=1, now=0.0)) == (0, 0, 10)
    ahead = replace(ask(epoch=1), ahead=1)
    assert data.lease(A, ahead, workers=1, now=0.0).verdict is LeaseVerdict.WAIT
    assert bounds(data.lease(A, ask(epoch=1), workers=1, now=0.0)) == (0, 10, 20)
