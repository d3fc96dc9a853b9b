"""How fast workers go through a stream, and what follows for its end: a slow worker must not hold up the others.

Ranges are cut as in guided self-scheduling, each worker's by its share of the speed of all. Near the end a batch of a
slow worker may take longer than the others need for all that is left; then it is theirs.
"""

from __future__ import annotations

from ps.control.api import LeaseAsk
from ps.types import Incarnation

PATIENCE = 2.0
"""A worker leaves the rest to the others for so many times as long as they should need for it."""

_LEAST_PATIENCE_S = 0.1
_ROUNDING = 1e-9


class Paces:
    """Samples per second of each worker, as they say with each ask. Not thread-safe; reads no clock."""

    def __init__(self) -> None:
        self._rates: dict[Incarnation, float] = {}  # workers that are gone are forgotten
        self._until: dict[Incarnation, float] = {}  # how long a worker leaves the rest to the others

    def note(self, worker: Incarnation, ask: LeaseAsk) -> None:
        """Take what the worker says of its own pace."""
        if ask.batch_s > 0:
            self._rates[worker] = ask.batch_size / ask.batch_s

    def forget(self, worker: Incarnation) -> None:
        """The worker is gone."""
        self._rates.pop(worker, None)
        self._until.pop(worker, None)

    def share(self, worker: Incarnation, workers: int) -> float:
        """The worker's part of the speed of `workers` live ones, in (0, 1]; of unknown ones the mean is assumed."""
        known = sum(self._rates.values())
        mean = known / len(self._rates) if self._rates else 1.0
        mine = self._rates.get(worker, mean)
        unknown = max(0, workers - len(self._rates.keys() | {worker}))
        others = known - self._rates.get(worker, 0.0) + unknown * mean
        return mine / (mine + others)

    def most_batches(self, worker: Incarnation, ask: LeaseAsk, *, pending: int, workers: int) -> int:
        """How many batches to lease out of `pending`: half of the worker's share, less what it still has ahead.

        At least one to a worker that has nothing left; perhaps none to one that only wants to fetch ahead.
        """
        batches = -(-pending // ask.batch_size) + ask.ahead
        fair = int(batches * self.share(worker, workers) / 2 + _ROUNDING)
        return min(ask.batches, max(fair - ask.ahead, 0 if ask.ahead else 1))

    def leaves_to_others(self, worker: Incarnation, ask: LeaseAsk, *, left: int, now: float) -> bool:
        """Whether the others will have done the `left` samples before this worker could have done one batch.

        Only for so long, `PATIENCE`: they may have stopped asking. `left` counts what they hold, too.
        """
        others = sum(rate for other, rate in self._rates.items() if other != worker)
        if not others or ask.batch_s <= left / others:
            self._until.pop(worker, None)
            return False
        until = self._until.setdefault(worker, now + max(_LEAST_PATIENCE_S, PATIENCE * left / others))
        if now < until:
            return True
        del self._until[worker]
        return False
