"""Answers that wait, and until when: a request is answered within `PARK_S`, if only to say that it is pending.

Waiting longer would meet the caller's own deadline and bring the payload a second time. Not thread-safe: the lock of
`Answers` guards it.
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
    """Works whose answers wait, by deadline."""

    _queue: deque[tuple[float, Work]] = field(default_factory=deque)
    """(deadline, work), ascending; one entry per answer. It holds no answer itself: an answer that has been given
    may hold a payload, and so a buffer. Entries go when their deadline comes, or when they are first and done."""

    def __len__(self) -> int:
        """Entries: answers that wait, and some that have been given."""
        return len(self._queue)

    def add(self, now: float, work: Work, answer: Answer) -> None:
        """`answer` waits for `work` from now on."""
        self._prune()
        work.answers.append((now + PARK_S, answer))
        self._queue.append((now + PARK_S, work))

    def expired(self, now: float) -> list[tuple[Work, Answer]]:
        """Take out the answers whose time is up, also out of their works."""
        found: list[tuple[Work, Answer]] = []
        while self._queue and self._queue[0][0] <= now:
            _, work = self._queue.popleft()
            late = [answer for deadline, answer in work.answers if deadline <= now]
            if late:
                work.answers = [entry for entry in work.answers if entry[0] > now]
                found += [(work, answer) for answer in late]
        return found

    def next_deadline(self) -> float | None:
        """When to look again; None when nothing waits."""
        self._prune()
        return self._queue[0][0] if self._queue else None

    def _prune(self) -> None:
        while self._queue and not self._queue[0][1].answers:
            self._queue.popleft()
