"""Who gets how much near a stream's end, by how fast each worker is."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ps.control.api import DataRange, LeaseAsk, LeaseVerdict
from ps.control.data_shards import DataShards
from ps.control.paces import PATIENCE, Paces
from ps.types import Incarnation
from tests.support.control import ask, stream

FAST, SLOW, NEW = Incarnation(1), Incarnation(2), Incarnation(3)


def asks(batch_s: float, *, ahead: int = 0, batches: int = 100) -> LeaseAsk:
    return replace(ask(batches=batches), batch_s=batch_s, ahead=ahead)


def paces() -> Paces:
    """One worker that needs 1 s for a batch of 10, and one that needs 4 s."""
    known = Paces()
    known.note(FAST, asks(1.0))
    known.note(SLOW, asks(4.0))
    return known


def test_shares_follow_the_pace() -> None:
    """4 : 1; a third whose pace is not known yet counts as the mean of the others; without any all are equal."""
    assert paces().share(FAST, 2) == pytest.approx(0.8)
    assert paces().share(NEW, 3) == pytest.approx(1 / 3)
    assert paces().share(FAST, 3) == pytest.approx(8 / 15)
    assert Paces().share(NEW, 4) == 0.25


def test_a_worker_that_is_gone_leaves_its_share_to_the_others() -> None:
    """Nobody waits for a fast worker that has left."""
    known = paces()
    known.forget(FAST)
    assert known.share(SLOW, 1) == 1.0
    assert not known.leaves_to_others(SLOW, asks(4.0), left=10, now=0.0)


@pytest.mark.parametrize(
    ("who", "ahead", "batches", "expected"),
    [(FAST, 0, 100, 40), (SLOW, 0, 100, 10), (SLOW, 4, 100, 6), (SLOW, 12, 100, 0), (FAST, 0, 3, 3)],
)
def test_half_of_the_share_less_what_lies_ahead(who: Incarnation, ahead: int, batches: int, expected: int) -> None:
    """Of 100 batches; fetching ahead never takes more than the share, and may get nothing."""
    request = asks(0.0, ahead=ahead, batches=batches)
    pending = (100 - ahead) * 10
    assert paces().most_batches(who, request, pending=pending, workers=2) == expected


def test_near_the_end_one_batch_at_a_time_and_nothing_ahead() -> None:
    """A worker with empty hands gets one; one that holds a batch gets no second."""
    assert paces().most_batches(SLOW, asks(4.0), pending=20, workers=2) == 1
    assert paces().most_batches(SLOW, asks(4.0, ahead=1), pending=20, workers=2) == 0


def test_the_last_samples_are_left_to_those_who_need_less_time() -> None:
    """What the fast one does in 3 s is not for a worker that needs 4 s for a batch; what takes it 5 s is."""
    assert paces().leaves_to_others(SLOW, asks(4.0), left=30, now=0.0)
    assert not paces().leaves_to_others(SLOW, asks(4.0), left=50, now=0.0)
    assert not paces().leaves_to_others(FAST, asks(1.0), left=10, now=0.0)
    assert not paces().leaves_to_others(NEW, asks(0.0), left=10, now=0.0)


def test_patience_ends() -> None:
    """The others may have stopped asking: after twice the time that they should need, the slow one gets the rest."""
    known = paces()
    assert known.leaves_to_others(SLOW, asks(4.0), left=30, now=100.0)
    assert known.leaves_to_others(SLOW, asks(4.0), left=30, now=100.0 + 3 * PATIENCE - 0.1)
    assert not known.leaves_to_others(SLOW, asks(4.0), left=30, now=100.0 + 3 * PATIENCE)


def test_a_slow_worker_waits_at_the_end_and_goes_on_before_it() -> None:
    """In the last epoch it waits for the others; in an earlier one all that is to come counts, and it gets a range."""
    data = DataShards(lambda part, whole: None)
    data.open(stream(length=40, epochs=2))
    assert data.lease(FAST, asks(1.0, batches=2), workers=2, now=0.0).range is not None
    assert data.lease(SLOW, asks(4.0), workers=2, now=0.0).range is not None  # 1 s of this epoch, 4 s of the next
    last = replace(asks(4.0), epoch=1)
    data.finish(data_range(0))
    data.lease(FAST, replace(asks(1.0, batches=9), epoch=1), workers=2, now=0.0)
    data.lease(FAST, replace(asks(1.0, batches=9), epoch=1), workers=2, now=0.0)
    for position in range(0, 20, 10):
        data.finish(data_range(position, epoch=1))
    lease = data.lease(SLOW, last, workers=2, now=0.0)
    assert lease.verdict is LeaseVerdict.WAIT
    assert data.lease(SLOW, last, workers=2, now=1000.0).range is not None


def data_range(begin: int, epoch: int = 0) -> DataRange:
    return DataRange(stream=0, epoch=epoch, begin=begin, end=begin + 10)
