"""Which leased samples are handed out, trained on, and acknowledged. Torch-free.

A batch is consumed when the next one is asked for, covered by the next push that is applied, then acknowledged.
What is covered is never handed back, what is not covered is never acknowledged while the stream runs.
"""

from __future__ import annotations

from collections.abc import Callable

from ps.clock import Clock
from ps.control.api import Control, DataRange

_ACK_S = 1.0
"""Acknowledgements wait at most about this long for company."""


class Ledger:
    """Books of one data stream. Not thread-safe: belongs to the training thread.

    Every leased position is in exactly one of: ahead, current, consumed, covered; or acknowledged, or handed back.
    """

    def __init__(self, control: Control, clock: Clock, *, needs_push: Callable[[], bool]) -> None:
        self._control = control
        self._clock = clock
        self._needs_push = needs_push  # False for a worker without a model: samples are done when consumed
        self._ahead: list[DataRange] = []
        self._current: DataRange | None = None
        self._current_covered = False  # by a push after the newest batch of it
        self._current_whole = False  # no further batch of it comes
        self._consumed: list[DataRange] = []
        self._covered: list[DataRange] = []
        self._acked_s = clock.now()
        self.unpushed = 0
        """Samples handed out since the last push."""

    @property
    def ahead(self) -> bool:
        """Whether leased samples wait to be handed out."""
        return bool(self._ahead)

    def leased(self, granted: DataRange) -> None:
        """A new lease."""
        _add(self._ahead, granted)

    def leave_out(self, leased: DataRange) -> None:
        """Leased samples that nobody is to have: they count as done."""
        _add(self._covered, leased)

    def hand_out(self, size: int, *, samples: int | None = None, whole: bool = True) -> DataRange:
        """The next `size` positions become the current range. The one before must be consumed.

        A position may stand for many samples, a numbered shard: then `samples` counts those of its first batch, and
        `whole` says whether that is all of it.
        """
        assert self._current is None and self._ahead
        lease = self._ahead.pop(0)
        batch = _part(lease, lease.begin, lease.begin + size)
        if batch.end < lease.end:
            self._ahead.insert(0, _part(lease, batch.end, lease.end))
        self._current = batch
        self.hand_out_more(size if samples is None else samples, whole=whole)
        return batch

    def hand_out_more(self, samples: int, *, whole: bool) -> None:
        """A batch of the current range; `whole`: the last one of it."""
        self._current_covered, self._current_whole = False, whole
        self.unpushed += samples

    def consume(self) -> None:
        """The next batch is asked for: the current range is consumed, if that was all of it."""
        if self._current is None or not self._current_whole:
            return
        needs_push = self._needs_push()
        _add(self._consumed if needs_push and not self._current_covered else self._covered, self._current)
        self._current = None
        if not needs_push:
            self.unpushed = 0

    def pushed(self) -> None:
        """A push was applied: it covers everything handed out."""
        self._current_covered = self._current is not None
        self.unpushed = 0
        for done in self._consumed:
            _add(self._covered, done)
        self._consumed.clear()
        if self._clock.now() - self._acked_s >= _ACK_S:
            self.acknowledge()

    def acknowledge(self) -> None:
        """Tell the coordinator what is covered, in one call."""
        self._send(())

    def finish(self) -> None:
        """Nothing more will come now: consumed samples count as done even where no push covers them.

        Otherwise the last batches of an accumulation, or skipped ones, would hold up the epoch for ever.
        """
        self._covered += self._consumed
        self._consumed.clear()
        self.unpushed = 0
        self.acknowledge()

    def hand_back(self) -> None:
        """The stream is left early: acknowledge what is covered, let others have all the rest."""
        if self._current_covered:
            self.consume()
        rest = [*self._consumed, *([] if self._current is None else [self._current]), *self._ahead]
        self._consumed.clear()
        self._ahead.clear()
        self._current = None
        self.unpushed = 0
        self._send(tuple(rest))

    def _send(self, returned: tuple[DataRange, ...]) -> None:
        done, self._covered = tuple(self._covered), []
        self._acked_s = self._clock.now()
        if done or returned:
            self._control.ack(done, returned)


def _part(samples: DataRange, begin: int, end: int) -> DataRange:
    return DataRange(stream=samples.stream, epoch=samples.epoch, begin=begin, end=end)


def _add(ranges: list[DataRange], new: DataRange) -> None:
    """Append, merged with the last one where they touch, so that lists stay short."""
    last = ranges[-1] if ranges else None
    if last is not None and (last.stream, last.epoch, last.end) == (new.stream, new.epoch, new.begin):
        ranges[-1] = _part(last, last.begin, new.end)
    else:
        ranges.append(new)
