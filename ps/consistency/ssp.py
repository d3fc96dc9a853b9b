"""Stale synchronous parallel, `ssp:S`: nobody begins a step more than S clocks ahead of the slowest worker.

Ho et al. 2013, "More effective distributed ML via a stale synchronous parallel parameter server", in the variant with
read-my-writes. A worker at clock c has pushed c updates. Its push is applied at once, whoever else lags behind, and is
answered only when  c − min(clocks) ≤ S.  So on every shard the weights with which a worker begins step c hold all
updates of all workers that take part up to their clock c − S, all of its own, and some newer ones; while a newcomer is
in its first step, one fewer of its. With S = 0 workers go in step, but each update is applied by itself, unlike in bsp.
"""

from __future__ import annotations

from collections.abc import Sequence

from ps.consistency.clocks import Clocks
from ps.consistency.policy import NOTHING, Alone, Decision, Due, Pace, PushEvent, Seat, Verdict
from ps.types import Incarnation


class Ssp(Alone):
    """See the module. Not thread-safe: the shard's lock guards it. Memory: a few numbers per live worker."""

    def __init__(self, bound: int) -> None:
        """`bound`: S, in clocks; 0 = in step."""
        self._bound = bound
        self._clocks = Clocks()
        self._parked: list[tuple[int, Incarnation, int]] = []
        """(clock after it, worker, push number) of pushes that wait for an answer."""

    def set_live(self, seats: Sequence[Seat]) -> None:
        """See `Policy.set_live`. Who enters holds the others as if it had the slowest one's clock."""
        gone = self._clocks.seat(seats, self._entry)
        self._parked = [entry for entry in self._parked if entry[1] not in gone]

    def decide(self, event: PushEvent) -> Decision:
        """See `Policy.decide`."""
        before = self._clocks.tick(event.incarnation)
        if before is None:
            return Decision(Verdict.REFUSE, f"incarnation {event.incarnation} takes no part in clocks")
        slowest = self._entry
        ahead = before + 1 - slowest
        if ahead <= self._bound:
            return Decision(Verdict.ADMIT, f"{ahead} clocks ahead of the slowest worker, {self._bound} are allowed")
        self._parked.append((before + 1, event.incarnation, event.sequence))
        return Decision(Verdict.PARK, f"{ahead} clocks ahead of the slowest worker, only {self._bound} are allowed")

    def due(self) -> Due:
        """Parked pushes whose workers are within the bound now."""
        if not self._parked:
            return NOTHING
        limit = self._entry + self._bound
        answers = tuple((worker, sequence) for clock, worker, sequence in self._parked if clock <= limit)
        if not answers:
            return NOTHING
        self._parked = [entry for entry in self._parked if entry[0] > limit]
        return Due(answers=answers)

    def must_take(self, incarnation: Incarnation) -> bool:
        """The slowest worker's push is what others wait for."""
        return bool(self._parked) and self._clocks.get(incarnation) == self._clocks.lowest

    def pace(self) -> Pace:
        """A newcomer starts beside the slowest worker, so that nobody is further ahead because of it."""
        return Pace(self._entry, self._clocks.spread)

    @property
    def _entry(self) -> int:
        lowest = self._clocks.lowest
        return self._clocks.reached if lowest is None else lowest
