"""PushOrder: decisions one by one."""

from __future__ import annotations

from ps.store.ordering import WINDOW, PushOrder, Verdict
from ps.types import Incarnation

A, B = Incarnation(10), Incarnation(11)


def test_in_order_is_applied_at_once() -> None:
    """0, 1, 2: each is applied, nothing is kept."""
    order = PushOrder()
    assert [order.offer(A, n).verdict for n in range(3)] == [Verdict.APPLY] * 3
    assert order.next_sequence(A) == 3
    assert not order.holds(A)
    order.validate()


def test_early_ones_wait_and_are_released_together() -> None:
    """2 and 1 are held; 0 releases both, in order."""
    order = PushOrder()
    assert order.offer(A, 2).verdict is Verdict.HOLD
    assert order.offer(A, 1).verdict is Verdict.HOLD
    assert order.holds(A)
    order.validate()
    decision = order.offer(A, 0)
    assert (decision.verdict, decision.released) == (Verdict.APPLY, (1, 2))
    assert order.next_sequence(A) == 3
    order.validate()


def test_a_gap_stops_the_release() -> None:
    """0 releases nothing while 1 is missing; 1 then releases 2."""
    order = PushOrder()
    order.offer(A, 2)
    assert order.offer(A, 0).released == ()
    assert order.offer(A, 1).released == (2,)


def test_repeats_are_told_apart() -> None:
    """An applied number is a duplicate, a held one is held; `look` says the same and changes nothing."""
    order = PushOrder()
    order.offer(A, 0)
    order.offer(A, 2)
    assert order.offer(A, 0).verdict is Verdict.DUPLICATE
    assert order.offer(A, 2).verdict is Verdict.HELD
    assert order.look(A, 0) is Verdict.DUPLICATE
    assert order.look(A, 2) is Verdict.HELD
    assert order.look(A, 1) is None
    assert order.next_sequence(A) == 1


def test_the_window_bounds_what_is_kept() -> None:
    """More than `WINDOW` ahead is busy, and not remembered."""
    order = PushOrder()
    assert order.offer(A, WINDOW).verdict is Verdict.HOLD
    assert order.offer(A, WINDOW + 1).verdict is Verdict.BUSY
    order.offer(A, 0)
    assert order.offer(A, WINDOW + 1).verdict is Verdict.HOLD


def test_workers_do_not_share_numbers() -> None:
    """Each worker has its own count; forgetting one leaves the other."""
    order = PushOrder()
    order.offer(A, 0)
    order.offer(B, 1)
    assert order.known() == (A, B)
    assert order.forget(B) == (1,)
    assert order.forget(B) == ()
    assert order.known() == (A,)
    assert order.next_sequence(A) == 1
