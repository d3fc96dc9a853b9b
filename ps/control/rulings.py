"""What one server's shard has decided for the shards of all servers, on its way through the coordinator.

Both ends keep the newest few and send them again on each new session, so that none is lost; receivers take them in any
order, and again. A round closes only when every server has its ruling, so nobody is ever far behind.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from ps.consistency.policy import Ruling

KEPT = 1024
"""Rulings that are kept for who comes back. A server that lags behind by more has long been evicted."""


class Rulings:
    """The newest rulings, in the order in which they came. Not thread-safe."""

    def __init__(self) -> None:
        self._kept: deque[Ruling] = deque()
        self._numbers: set[int] = set()
        self.end = 0
        """How many have come so far."""

    def add(self, rulings: Sequence[Ruling]) -> bool:
        """Keep those that are new; whether any is."""
        fresh = [ruling for ruling in rulings if ruling.number not in self._numbers]
        for ruling in fresh:
            self._kept.append(ruling)
            self._numbers.add(ruling.number)
            if len(self._kept) > KEPT:
                self._numbers.remove(self._kept.popleft().number)
        self.end += len(fresh)
        return bool(fresh)

    def since(self, begin: int) -> tuple[Ruling, ...]:
        """Those that have come after the first `begin`, as far as they are kept."""
        count = min(self.end - begin, len(self._kept))
        return tuple(self._kept[index] for index in range(len(self._kept) - count, len(self._kept)))
