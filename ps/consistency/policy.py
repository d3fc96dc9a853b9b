"""The interface of consistency choices: events in, decisions with their reasons out. Pure, no I/O, no clock.

There is one policy per shard. It is asked once per push, when the push is next in its worker's order, and told which
workers take part. Whatever an event makes possible for others (rounds to close, answers to give) it hands out by `due`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from ps.types import Incarnation, Part, ShardId

PushKey = tuple[Incarnation, int]
"""A worker and its push number."""


class Verdict(Enum):
    """What becomes of a push."""

    ADMIT = "admit"
    """Apply it now and answer."""
    PARK = "park"
    """Apply it now; `due` says when to answer."""
    COLLECT = "collect"
    """Add it to its round; `due` says when the round is applied, which answers it."""
    DROP = "drop"
    """Don't apply it; it is answered as if it had been, with the newest weights."""
    REFUSE = "refuse"
    """It can't count: its worker breaks the rules."""


@dataclass(frozen=True, slots=True)
class PushEvent:
    """A push to one shard, about to be applied."""

    shard: ShardId
    incarnation: Incarnation
    sequence: int
    """The worker's push number, from 0."""
    staleness: int | None
    """Versions applied by other workers since the weights on which the gradient was computed; None across epochs."""


@dataclass(frozen=True, slots=True)
class Decision:
    """A verdict and why. The reason is log line, status text and test assertion alike."""

    verdict: Verdict
    reason: str
    round: int = 0
    """With COLLECT: its round; -1 while that isn't decided."""


@dataclass(frozen=True, slots=True)
class Seat:
    """A worker that may push, and its part."""

    incarnation: Incarnation
    part: Part = Part.IN
    clock: int = 0
    """With IN: the clock of its next push. Means nothing for one that is IN already."""


@dataclass(frozen=True, slots=True)
class Closed:
    """A round that is complete: apply the mean of these pushes, which answers them."""

    round: int
    pushes: tuple[PushKey, ...]
    """In the order of summation: ascending."""
    shrunk: bool = False
    """A worker that the round had counted on is missing: it has left or died."""


@dataclass(frozen=True, slots=True)
class Due:
    """What has become possible; each item is handed out once."""

    rounds: tuple[Closed, ...] = ()
    answers: tuple[PushKey, ...] = ()
    """Parked pushes to be answered now."""
    dropped: tuple[PushKey, ...] = ()
    """Collected pushes that are in no round: answered like DROP."""


NOTHING = Due()


@dataclass(frozen=True, slots=True)
class Ruling:
    """What one shard has decided for all shards."""

    number: int
    """From 0, without gaps."""
    pushes: tuple[PushKey, ...] = ()
    """A round: apply the mean of these."""
    dropped: tuple[PushKey, ...] = ()
    """In no round."""


@dataclass(frozen=True, slots=True)
class Pace:
    """How far the workers of one shard are."""

    entry: int | None = None
    """Clock at which a worker that is ENTERING counts here for the time being; None = clocks don't matter."""
    spread: int = 0
    """Clock of the fastest less that of the slowest."""


class Policy(Protocol):
    """One consistency choice on one shard. Not thread-safe: called with the shard's lock held, so it must be quick."""

    keeps_all: bool
    """Rounds may leave out pushes that have come, so that sums can't be made as they come."""

    def appoint(self) -> None:
        """This shard decides for all shards of the job, where one has to."""
        ...

    def rulings(self) -> tuple[Ruling, ...]:
        """What it has decided since the last call."""
        ...

    def follow(self, rulings: Sequence[Ruling]) -> None:
        """What the other shard has decided. Follow with `due`."""
        ...

    def set_live(self, seats: Sequence[Seat]) -> None:
        """Exactly these workers may push from now on. Follow with `due`."""
        ...

    def decide(self, event: PushEvent) -> Decision:
        """Whether and how this push counts. Follow with `due`."""
        ...

    def due(self) -> Due:
        """What the events since the last call have made possible."""
        ...

    def must_take(self, incarnation: Incarnation) -> bool:
        """Whether others may be waiting for a push of this worker, so that it must never be told to come later.

        May be called without the lock; it is then a moment old.
        """
        ...

    def pace(self) -> Pace:
        """How far workers are."""
        ...


class Alone:
    """Base of choices that each shard makes by itself."""

    keeps_all = False

    def appoint(self) -> None:
        """See `Policy.appoint`: nobody decides for others."""

    def rulings(self) -> tuple[Ruling, ...]:
        """See `Policy.rulings`: there are none."""
        return ()

    def follow(self, rulings: Sequence[Ruling]) -> None:
        """See `Policy.follow`: there are none."""
