"""Clocks of the workers that take part, on one shard: how many pushes of each have counted, from an agreed start.

The start of a newcomer is agreed on in two steps, so that it is the same on all shards. First it counts at an entry
clock of the shard's own choosing, which holds the others; then at the clock that the coordinator has made of all
shards' entries. Were it chosen per shard, two workers could each be the slower one somewhere, and wait for each other.
"""

from __future__ import annotations

from collections.abc import Sequence

from ps.consistency.policy import Seat
from ps.types import Incarnation, Part


class Clocks:
    """Worker → clock: the number of its next push, in rounds. Not thread-safe."""

    def __init__(self) -> None:
        self._clocks: dict[Incarnation, int] = {}
        self._entering: set[Incarnation] = set()
        """Those of the above whose start is not agreed on yet."""
        self.reached = 0
        """Highest clock that any worker has had by pushing."""

    def seat(self, seats: Sequence[Seat], entry: int) -> dict[Incarnation, int]:
        """Follow the coordinator; who newly enters counts at `entry`. Returns who is gone, with the clocks they had."""
        parts = {seat.incarnation: seat for seat in seats}
        gone = {one: clock for one, clock in self._clocks.items() if one not in parts or parts[one].part is Part.OUT}
        for one in gone:
            del self._clocks[one]
            self._entering.discard(one)
        for one, seat in parts.items():
            if seat.part is Part.ENTERING and one not in self._entering:
                self._clocks[one] = entry
                self._entering.add(one)
            elif seat.part is Part.IN and (one in self._entering or one not in self._clocks):
                self._clocks[one] = seat.clock
                self._entering.discard(one)
        return gone

    def tick(self, worker: Incarnation) -> int | None:
        """A push of this worker counts: the clock it had; None when it takes no part."""
        clock = self._clocks.get(worker)
        if clock is None or worker in self._entering:
            return None
        self._clocks[worker] = clock + 1
        self.reached = max(self.reached, clock + 1)
        return clock

    def get(self, worker: Incarnation) -> int | None:
        """A worker's clock; None when it takes no part."""
        return self._clocks.get(worker)

    @property
    def lowest(self) -> int | None:
        """Clock of the slowest; None when nobody takes part."""
        return min(self._clocks.values(), default=None)

    @property
    def spread(self) -> int:
        """Clock of the fastest less that of the slowest."""
        return max(self._clocks.values()) - min(self._clocks.values()) if self._clocks else 0

    def __len__(self) -> int:
        return len(self._clocks)
