"""Each push of a worker to a shard is applied once and in order, although the network keeps no order.

Per worker incarnation: the next number expected, and which later ones are held back, at most `WINDOW` ahead. The
highest number seen would not do (with two pushes in flight it loses every fourth), nor would a set of the last few
(it applies some twice, and out of order). Pure; not thread-safe: the shard's lock guards it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from ps.types import Incarnation

WINDOW = 2
"""How far ahead of the next expected number a push may be."""


class Verdict(Enum):
    """What to do with a push."""

    APPLY = "apply"
    """It is the next one: apply it, then the `released` ones."""
    HOLD = "hold"
    """An earlier one is missing: keep it until that one has been applied."""
    HELD = "held"
    """The same push is being held already: it has only to wait."""
    DUPLICATE = "duplicate"
    """It was applied before."""
    BUSY = "busy"
    """Too far ahead to be kept: not accepted, to be sent again later."""


@dataclass(frozen=True, slots=True)
class Order:
    """A decision about one push."""

    verdict: Verdict
    released: tuple[int, ...] = ()
    """With APPLY: held numbers that follow without a gap, ascending; they count as applied from now on."""


_APPLY = Order(Verdict.APPLY)
_HOLD = Order(Verdict.HOLD)
_HELD = Order(Verdict.HELD)
_DUPLICATE = Order(Verdict.DUPLICATE)
_BUSY = Order(Verdict.BUSY)


@dataclass(slots=True)
class PushOrder:
    """Order of the pushes to one shard. Memory: one number per live worker, and `WINDOW` held ones."""

    _next: dict[Incarnation, int] = field(default_factory=dict)
    """Number of pushes applied so far; absent = 0. Never falls while the worker lives."""
    _held: dict[Incarnation, set[int]] = field(default_factory=dict)
    """Numbers kept back: all in (next, next + WINDOW]; no empty sets."""

    def next_sequence(self, incarnation: Incarnation) -> int:
        """The number expected next. May be read without the shard's lock: it is then a moment old."""
        return self._next.get(incarnation, 0)

    def offer(self, incarnation: Incarnation, sequence: int) -> Order:
        """Decide about push number `sequence`. APPLY and HOLD are remembered: the caller must do as told."""
        expected = self._next.get(incarnation, 0)
        if sequence == expected:
            return self._apply(incarnation, expected)
        if sequence < expected:
            return _DUPLICATE
        if sequence > expected + WINDOW:
            return _BUSY
        held = self._held.setdefault(incarnation, set())
        if sequence in held:
            return _HELD
        held.add(sequence)
        return _HOLD

    def too_far(self, incarnation: Incarnation, sequence: int) -> bool:
        """Whether `offer` would answer BUSY."""
        return sequence > self._next.get(incarnation, 0) + WINDOW

    def look(self, incarnation: Incarnation, sequence: int) -> Verdict | None:
        """What is known about a push, changing nothing: DUPLICATE, HELD, or None for a push never seen."""
        if sequence < self._next.get(incarnation, 0):
            return Verdict.DUPLICATE
        return Verdict.HELD if sequence in self._held.get(incarnation, ()) else None

    def holds(self, incarnation: Incarnation) -> bool:
        """Whether a push of this worker is held back. May be read without the shard's lock."""
        return incarnation in self._held

    def forget(self, incarnation: Incarnation) -> tuple[int, ...]:
        """Drop all about a worker that is not admitted any more; returns the numbers that were held, ascending.

        Safe only because the host refuses incarnations that are not admitted, and no incarnation is used twice.
        """
        self._next.pop(incarnation, None)
        return tuple(sorted(self._held.pop(incarnation, ())))

    def known(self) -> tuple[Incarnation, ...]:
        """Incarnations with an entry, ascending."""
        return tuple(sorted(self._next.keys() | self._held.keys()))

    def validate(self) -> None:
        """Check every invariant; raises AssertionError."""
        for incarnation, held in self._held.items():
            expected = self._next.get(incarnation, 0)
            assert held, f"empty held set of {incarnation}"
            assert all(expected < number <= expected + WINDOW for number in held), (incarnation, expected, held)

    def _apply(self, incarnation: Incarnation, expected: int) -> Order:
        held = self._held.get(incarnation)
        if not held:
            self._next[incarnation] = expected + 1
            return _APPLY
        released: list[int] = []
        while expected + 1 + len(released) in held:
            released.append(expected + 1 + len(released))
        held.difference_update(released)
        if not held:
            del self._held[incarnation]
        self._next[incarnation] = expected + 1 + len(released)
        return Order(Verdict.APPLY, tuple(released))
