"""Bulk synchronous parallel, `bsp`: rounds in which each worker pushes once, and one update with the mean of them.

    w ← optimizer(w, (1/n) Σ gᵢ)      i over the n workers that pushed in this round, in the order of their numbers

The plain mean: a batch that is shorter than others counts as much. A piece without gradient in some of the pushes
counts as zero there, one without in all of them is left alone. Each shard decides by itself, from the same clocks;
when a worker dies, shards that have its push use it, others take the mean over those that are there.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from ps.consistency.clocks import Clocks
from ps.consistency.policy import NOTHING, Alone, Closed, Decision, Due, Pace, PushEvent, PushKey, Seat, Verdict
from ps.types import Incarnation


class Bsp(Alone):
    """See the module. Not thread-safe: the shard's lock guards it. Memory: a few numbers per live worker."""

    def __init__(self) -> None:
        self._clocks = Clocks()
        self._rounds: dict[int, list[PushKey]] = {}
        """Open rounds that have pushes. At most two, unless somebody has just entered."""
        self._shrunk: set[int] = set()
        """Those of the above that lack a worker they had counted on."""

    def set_live(self, seats: Sequence[Seat]) -> None:
        """See `Policy.set_live`. Who enters keeps every round open that nobody has pushed to yet."""
        for clock in self._clocks.seat(seats, self._clocks.reached).values():
            self._shrunk.update(number for number in self._rounds if number >= clock)

    def decide(self, event: PushEvent) -> Decision:
        """See `Policy.decide`."""
        clock = self._clocks.tick(event.incarnation)
        if clock is None:
            return Decision(Verdict.REFUSE, f"incarnation {event.incarnation} takes no part in rounds")
        self._rounds.setdefault(clock, []).append((event.incarnation, event.sequence))
        return Decision(Verdict.COLLECT, f"in round {clock}, with {len(self._clocks)} workers", clock)

    def due(self) -> Due:
        """Rounds to which everybody has pushed."""
        lowest = self._clocks.lowest
        limit = math.inf if lowest is None else lowest
        complete = sorted(number for number in self._rounds if number < limit)
        if not complete:
            return NOTHING
        closed = tuple(
            Closed(number, tuple(sorted(self._rounds.pop(number))), number in self._shrunk) for number in complete
        )
        self._shrunk.difference_update(complete)
        return Due(rounds=closed)

    def must_take(self, incarnation: Incarnation) -> bool:
        """A round waits for the slowest worker's push."""
        return self._clocks.get(incarnation) == self._clocks.lowest

    def pace(self) -> Pace:
        """A newcomer takes part from the first round that nobody has pushed to."""
        return Pace(self._clocks.reached, self._clocks.spread)
