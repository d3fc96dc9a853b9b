"""From the name of a consistency choice to what servers and the coordinator make of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ps.config import parse_consistency
from ps.consistency.asp import Asp
from ps.consistency.backup import Backup
from ps.consistency.bsp import Bsp
from ps.consistency.policy import Policy
from ps.consistency.ssp import Ssp


@dataclass(frozen=True, slots=True)
class Choice:
    """One consistency choice."""

    make: Callable[[], Policy]
    """Makes the policy of one shard."""
    first: Callable[[Sequence[int]], int] | None = None
    """First clock of a newcomer, from the entries of all shards; None where clocks don't matter."""


def choice(name: str) -> Choice:
    """What `--consistency NAME` means. Raises `ConfigError` for a name that means nothing."""
    kind, number = parse_consistency(name)
    if kind == "ssp":
        return Choice(lambda: Ssp(number), _first_ssp)
    if kind == "bsp":
        return Choice(lambda: Backup(number)) if number else Choice(Bsp, _first_bsp)
    return Choice(Asp)


def _first_ssp(entries: Sequence[int]) -> int:
    """Beside the slowest worker of all: so nobody is further ahead of the newcomer than the bound allows."""
    return min(entries, default=0)


def _first_bsp(entries: Sequence[int]) -> int:
    """The first round that is not open anywhere: on no shard it could have closed already."""
    return max(entries, default=0)
