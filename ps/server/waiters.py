"""Answers that wait, and until when: a request is answered within `PARK_S`, if only to say that it is pending.

Waiting longer would meet the caller's own deadline and bring the payload a second time. Not thread-safe: the host's
lock guards it.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from ps.rpc.transport import Answer
from ps.server.slots import Work

PARK_S = 2.0
"""Longest time an answer is kept waiting."""


@dataclass(slots=True)
class Waiters:
    """All answers that wait, oldest first."""

    _queue: deque[tuple[float, Work, Answer]] = field(default_factory=deque)
    """(deadline, work, answer), ascending; entries of works that have been answered meanwhile are skipped. They are
    removed at the latest when their deadline comes."""

    def add(self, now: float, work: Work, answer: Answer) -> None:
        """`answer` is among `work.answers` and waits from now on."""
        self._prune()
        self._queue.append((now + PARK_S, work, answer))

    def expired(self, now: float) -> list[tuple[Work, Answer]]:
        """Take out the answers whose time is up, also out of their works."""
        found: list[tuple[Work, Answer]] = []
        while self._queue and self._queue[0][0] <= now:
            _, work, answer = self._queue.popleft()
            if answer in work.answers:
                work.answers.remove(answer)
                found.append((work, answer))
        return found

    def next_deadline(self) -> float | None:
        """When to look again."""
        self._prune()
        return self._queue[0][0] if self._queue else None

    def waiting(self) -> int:
        """How many answers wait."""
        return sum(answer in work.answers for _, work, answer in self._queue)

    def _prune(self) -> None:
        while self._queue and self._queue[0][2] not in self._queue[0][1].answers:
            self._queue.popleft()
