"""The interface of consistency choices: one push in, one decision with its reason out. Pure, no I/O.

A policy is asked once per shard and push, when the push is next in its worker's order, and decides whether it counts.
It is told which workers are live; a choice that needs their clocks keeps them itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from ps.types import Incarnation, ShardId


class Verdict(Enum):
    """What becomes of a push."""

    ADMIT = "admit"
    """Apply it now."""
    DROP = "drop"
    """Don't apply it; it is answered as if it had been, with the newest weights."""


@dataclass(frozen=True, slots=True)
class PushEvent:
    """A push to one shard, about to be applied."""

    shard: ShardId
    incarnation: Incarnation
    sequence: int
    """The worker's clock: its push number, from 0."""
    staleness: int | None
    """Versions applied by other workers since the weights on which the gradient was computed; None across epochs."""


@dataclass(frozen=True, slots=True)
class Decision:
    """A verdict and why. The reason is log line, status text and test assertion alike."""

    verdict: Verdict
    reason: str


class Policy(Protocol):
    """One consistency choice. Thread-safe; called with a shard's lock held, so it must be quick and take no lock
    of the host."""

    def set_live(self, workers: Sequence[Incarnation]) -> None:
        """Exactly these workers take part from now on."""
        ...

    def decide(self, event: PushEvent) -> Decision:
        """Whether this push counts."""
        ...
