"""`bsp:backup=B`: rounds that don't wait for the B slowest workers, whose pushes are dropped.

Chen et al. 2016, "Revisiting distributed synchronous SGD". With n workers a round closes as soon as max(1, n − B) of
them have pushed gradients of the newest weights; a push that comes later was computed on older ones, is dropped and
answered with the newest weights. Its samples count as done.

Shards would choose different workers, each by who came first there. So one shard, the *decider*, chooses for all: it
numbers its rulings, and the others keep every push until a ruling has come that names it. What is late is judged by the
decider's version, so a worker that comes between two rounds may bring a gradient whose other shards are a round newer.
"""

from __future__ import annotations

from collections.abc import Sequence

from ps.consistency.policy import NOTHING, Closed, Decision, Due, Pace, PushEvent, PushKey, Ruling, Seat, Verdict
from ps.types import Incarnation, Part


class Backup:
    """See the module. Not thread-safe: the shard's lock guards it. Memory: a few numbers per live worker."""

    keeps_all = True

    def __init__(self, backups: int) -> None:
        """`backups`: B."""
        self._backups = backups
        self._decides = False
        self._live: set[Incarnation] = set()
        """Workers that count."""
        self._present: set[Incarnation] = set()
        """Workers that may push: those, and who has stepped aside."""
        self._here: set[PushKey] = set()
        """Pushes that are kept, and in no round yet."""
        self._undecided: list[PushKey] = []
        """Decider: those of the above that it has not ruled on."""
        self._made: list[Ruling] = []
        """Decider: rulings for the other shards."""
        self._numbers = 0
        """Decider: rulings made so far."""
        self._rulings: dict[int, Ruling] = {}
        """To be followed, by number."""
        self._next = 0
        """Number of the one to be followed next."""
        self._late: set[PushKey] = set()
        """Dropped by rulings, and not here yet."""
        self._dropped: list[PushKey] = []
        """Dropped, and to be answered."""

    def appoint(self) -> None:
        """See `Policy.appoint`."""
        self._decides = True

    def set_live(self, seats: Sequence[Seat]) -> None:
        """See `Policy.set_live`. Pushes of who is gone count only where they were ruled on before."""
        kept = {seat.incarnation for seat in seats if seat.part is Part.KEPT} & self._live
        self._live = {seat.incarnation for seat in seats if seat.part is Part.IN} | kept
        self._present = {seat.incarnation for seat in seats}
        ruled = {key for ruling in self._rulings.values() for key in ruling.pushes}
        gone = sorted(key for key in self._here - ruled if key[0] not in self._present)
        self._here.difference_update(gone)
        self._undecided = [key for key in self._undecided if key not in gone]
        self._dropped += gone
        self._late = {key for key in self._late if key[0] in self._present}
        self._rule_if_enough()

    def decide(self, event: PushEvent) -> Decision:
        """See `Policy.decide`."""
        key = (event.incarnation, event.sequence)
        if key in self._late:
            self._late.remove(key)
            return Decision(Verdict.DROP, "the shard that decides has dropped it")
        if self._decides and event.staleness != 0:
            self._rule(dropped=(key,))
            return Decision(Verdict.DROP, f"its weights are {event.staleness} rounds old")
        self._here.add(key)
        if self._decides:
            self._undecided.append(key)
            self._rule_if_enough()
        return Decision(Verdict.COLLECT, "kept until it is ruled on")

    def due(self) -> Due:
        """Rounds that are ruled on and complete here, and pushes that are in none."""
        rounds: list[Closed] = []
        while (ruling := self._rulings.get(self._next)) is not None and self._complete(ruling):
            del self._rulings[self._next]
            self._next += 1
            here = tuple(sorted(self._here.intersection(ruling.pushes)))
            if here:
                rounds.append(Closed(0, here, shrunk=len(here) < len(ruling.pushes)))
            for key in ruling.dropped:
                if key in self._here:
                    self._dropped.append(key)
                elif not self._decides and key[0] in self._present:
                    self._late.add(key)
            self._here.difference_update(ruling.pushes, ruling.dropped)
        dropped, self._dropped = tuple(self._dropped), []
        return Due(rounds=tuple(rounds), dropped=dropped) if rounds or dropped else NOTHING

    def must_take(self, incarnation: Incarnation) -> bool:
        """A ruling may name any push."""
        return True

    def pace(self) -> Pace:
        """There are no clocks: a newcomer takes part as soon as it has the newest weights."""
        return Pace()

    def rulings(self) -> tuple[Ruling, ...]:
        """See `Policy.rulings`."""
        made, self._made = tuple(self._made), []
        return made

    def follow(self, rulings: Sequence[Ruling]) -> None:
        """See `Policy.follow`. In any order, and again, is fine."""
        for ruling in rulings:
            if ruling.number >= self._next:
                self._rulings[ruling.number] = ruling

    def _complete(self, ruling: Ruling) -> bool:
        return all(key in self._here or key[0] not in self._present for key in ruling.pushes)

    def _rule_if_enough(self) -> None:
        if self._undecided and len(self._undecided) >= len(self._live) - self._backups:
            pushes, self._undecided = tuple(sorted(self._undecided)), []
            self._rule(pushes=pushes)

    def _rule(self, pushes: tuple[PushKey, ...] = (), dropped: tuple[PushKey, ...] = ()) -> None:
        ruling = Ruling(self._numbers, pushes, dropped)
        self._numbers += 1
        self._made.append(ruling)
        self._rulings[ruling.number] = ruling
