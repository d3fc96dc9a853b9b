"""Clocks: agreed starts, entries, and who is gone."""

from __future__ import annotations

from ps.consistency.clocks import Clocks
from ps.consistency.policy import Seat
from ps.types import Incarnation, Part

A, B = Incarnation(10), Incarnation(11)


def test_a_newcomer_counts_at_the_entry_until_its_clock_is_agreed() -> None:
    """ENTERING: at the shard's own choice, and it may not push yet. IN: at the agreed clock, once."""
    clocks = Clocks()
    clocks.seat([Seat(A)], entry=0)
    assert [clocks.tick(A) for _ in range(5)] == [0, 1, 2, 3, 4]
    clocks.seat([Seat(A), Seat(B, Part.ENTERING)], entry=5)
    assert (clocks.get(B), clocks.lowest, clocks.tick(B)) == (5, 5, None)
    clocks.seat([Seat(A), Seat(B, Part.IN, 7)], entry=5)
    assert clocks.tick(B) == 7
    clocks.seat([Seat(A), Seat(B, Part.IN, 7)], entry=5)
    assert clocks.get(B) == 8, "the clock in a seat is that of the start only"
    assert (clocks.lowest, clocks.spread, clocks.reached) == (5, 3, 8)


def test_who_steps_aside_or_goes_is_not_counted() -> None:
    """OUT and absent are gone, with their clocks; coming back means entering again."""
    clocks = Clocks()
    clocks.seat([Seat(A), Seat(B)], entry=0)
    clocks.tick(A)
    assert clocks.seat([Seat(A), Seat(B, Part.OUT)], entry=1) == {B: 0}
    assert (clocks.lowest, clocks.tick(B)) == (1, None)
    assert clocks.seat([Seat(A), Seat(B, Part.ENTERING)], entry=1) == {}
    assert clocks.seat([Seat(B, Part.IN, 3)], entry=1) == {A: 1}
    assert (clocks.lowest, len(clocks)) == (3, 1)


def test_a_restarted_coordinator_leaves_clocks_as_they_are() -> None:
    """KEPT: who counts goes on, who had stepped aside stays aside."""
    clocks = Clocks()
    clocks.seat([Seat(A)], entry=0)
    clocks.tick(A)
    assert clocks.seat([Seat(A, Part.KEPT), Seat(B, Part.KEPT)], entry=1) == {}
    assert (clocks.get(A), clocks.get(B)) == (1, None)
