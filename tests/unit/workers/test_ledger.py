"""Books of a data stream: what is acknowledged and handed back, and when."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import cast

from ps.control.api import Control, DataRange
from workers.ledger import Ledger


class StillClock:
    """Time stands still unless told."""

    def __init__(self) -> None:
        self.time_s = 0.0

    def now(self) -> float:
        return self.time_s

    def wait(self, event: threading.Event, timeout_s: float) -> bool:
        self.time_s += timeout_s
        return event.is_set()


@dataclass
class Acks:
    """A control line that only takes acknowledgements."""

    done: list[tuple[int, int]] = field(default_factory=list)
    returned: list[tuple[int, int]] = field(default_factory=list)
    calls: int = 0

    def ack(self, done: tuple[DataRange, ...], returned: tuple[DataRange, ...] = ()) -> None:
        self.calls += 1
        self.done += [(part.begin, part.end) for part in done]
        self.returned += [(part.begin, part.end) for part in returned]


def positions(begin: int, end: int) -> DataRange:
    return DataRange(stream=0, epoch=0, begin=begin, end=end)


def ledger(*, needs_push: bool = True) -> tuple[Ledger, Acks, StillClock]:
    acks, clock = Acks(), StillClock()
    books = Ledger(cast(Control, acks), clock, needs_push=lambda: needs_push)
    books.leased(positions(0, 40))
    return books, acks, clock


def test_a_batch_is_acknowledged_only_after_a_push() -> None:
    """Consumed is not enough; the push that follows covers it; touching ranges go out as one."""
    books, acks, _ = ledger()
    assert books.hand_out(10) == positions(0, 10)
    books.consume()
    books.acknowledge()
    assert acks.calls == 0
    books.hand_out(10)
    assert books.unpushed == 20
    books.pushed()
    assert books.unpushed == 0
    books.consume()
    books.acknowledge()
    assert acks.done == [(0, 20)] and acks.calls == 1


def test_leaving_early_returns_what_no_push_covers() -> None:
    """After a push in the current batch that batch is done, and only what lies ahead goes back."""
    books, acks, _ = ledger()
    books.hand_out(10)
    books.pushed()
    books.hand_back()
    assert acks.done == [(0, 10)] and acks.returned == [(10, 40)]


def test_leaving_before_the_push_returns_the_current_batch_too() -> None:
    """Consumed (skipped) and current batches without a push are handed back with the rest."""
    books, acks, _ = ledger()
    books.hand_out(10)
    books.consume()
    books.hand_out(10)
    books.hand_back()
    assert acks.done == [] and sorted(acks.returned) == [(0, 10), (10, 20), (20, 40)]


def test_two_pushes_on_one_batch_count_its_samples_once() -> None:
    """Samples are counted with the first push after they were handed out."""
    books, _, _ = ledger()
    books.hand_out(10)
    books.pushed()
    assert books.unpushed == 0


def test_the_end_of_an_epoch_covers_the_tail_of_an_accumulation() -> None:
    """Batches after the last push would hold up the epoch for ever; at its end they count as done."""
    books, acks, _ = ledger()
    books.hand_out(40)
    books.consume()
    books.finish()
    assert acks.done == [(0, 40)]
    books.hand_back()
    assert acks.calls == 1


def test_acknowledgements_wait_about_a_second_for_company() -> None:
    """Within a lease the coordinator hears from us about once a second."""
    books, acks, clock = ledger()
    for _ in range(3):
        books.hand_out(10)
        books.pushed()
        books.consume()
        clock.time_s += 0.6
    assert acks.calls == 1 and acks.done == [(0, 20)]


def test_without_a_model_consumed_is_done() -> None:
    """A worker that never attaches has no pushes to wait for."""
    books, acks, _ = ledger(needs_push=False)
    books.hand_out(10)
    books.consume()
    books.acknowledge()
    assert acks.done == [(0, 10)]


def test_a_range_of_several_batches_is_done_with_the_last_one() -> None:
    """A shard: pushes in between don't cover it, its samples count, and it goes back whole."""
    books, acks, _ = ledger()
    books.hand_out(1, samples=7, whole=False)
    books.pushed()
    books.consume()
    books.hand_out_more(5, whole=False)
    assert books.unpushed == 5
    books.hand_back()
    assert acks.done == [] and acks.returned == [(0, 1), (1, 40)]
    books.leased(positions(0, 1))
    books.hand_out(1, samples=7, whole=False)
    books.hand_out_more(3, whole=True)
    assert books.unpushed == 10
    books.pushed()
    books.consume()
    books.acknowledge()
    assert acks.done == [(0, 1)]
