"""Data streams: ranges of each epoch's permutation, leased, acknowledged, and requeued when a holder goes.

Every position of an epoch is at any time in exactly one of three places: pending, held by one worker, or done. A lease
ends by acknowledgement, by hand-back or with its holder, never by age: a slow worker is not a dead one.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from ps.control.api import DataRange, Lease, LeaseAsk, LeaseVerdict, StreamSpec
from ps.control.paces import Paces
from ps.errors import Refused, WireError
from ps.types import Incarnation

LAST = ("merge", "short", "drop")
MAX_STREAMS = 1000
"""More `epochs()` calls than this in one script are a bug in it."""


class Spans:
    """A set of integers kept as sorted, disjoint, not adjacent half-open spans."""

    def __init__(self, *spans: tuple[int, int]) -> None:
        self._begins: list[int] = []
        self._ends: list[int] = []
        self.total = 0
        for begin, end in spans:
            self.add(begin, end)

    def __iter__(self) -> Iterator[tuple[int, int]]:
        return iter(list(zip(self._begins, self._ends, strict=True)))

    def __bool__(self) -> bool:
        return self.total > 0

    def add(self, begin: int, end: int) -> None:
        """Add [begin, end); what is in already stays."""
        if begin >= end:
            return
        low = bisect_left(self._ends, begin)
        high = bisect_right(self._begins, end)
        if low < high:
            begin, end = min(begin, self._begins[low]), max(end, self._ends[high - 1])
        self._replace(low, high, [(begin, end)])

    def remove(self, begin: int, end: int) -> list[tuple[int, int]]:
        """Take [begin, end) out; returns the spans that were in."""
        low = bisect_right(self._ends, begin)
        high = bisect_left(self._begins, end)
        hit = list(zip(self._begins[low:high], self._ends[low:high], strict=True))
        if not hit or begin >= end:
            return []
        outside = [(hit[0][0], min(begin, hit[0][1])), (max(end, hit[-1][0]), hit[-1][1])]
        self._replace(low, high, [(b, e) for b, e in outside if b < e])
        return [(max(b, begin), min(e, end)) for b, e in hit]

    def _replace(self, low: int, high: int, spans: list[tuple[int, int]]) -> None:
        self.total -= sum(self._ends[low:high]) - sum(self._begins[low:high])
        self.total += sum(end - begin for begin, end in spans)
        self._begins[low:high] = [begin for begin, _ in spans]
        self._ends[low:high] = [end for _, end in spans]


@dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """How much of a span to lease: up to `end`, in batches of `sizes`; the last `dropped` samples are left out."""

    end: int
    sizes: tuple[int, ...]
    dropped: int = 0


def cut(begin: int, end: int, *, is_tail: bool, ask: LeaseAsk, batches: int) -> Cut:
    """Cut at most `batches` batches off the front of the pending span [begin, end).

    `is_tail`: the span ends where the epoch ends. Only there are samples dropped; a short rest elsewhere, which
    only workers with different batch sizes leave behind, is never lost.
    """
    batch = ask.batch_size
    whole, rest = divmod(end - begin, batch)
    if whole > batches:
        return Cut(end=begin + batches * batch, sizes=(batch,) * batches)
    if not rest:
        return Cut(end=end, sizes=(batch,) * whole)
    if ask.last == "drop" and is_tail:
        return Cut(end=end, sizes=(batch,) * whole, dropped=rest)
    if ask.last == "merge" and whole and 2 * rest < batch:
        return Cut(end=end, sizes=(*(batch,) * (whole - 1), batch + rest))
    if whole == batches:
        return Cut(end=begin + whole * batch, sizes=(batch,) * whole)
    return Cut(end=end, sizes=(*(batch,) * whole, rest))


class Epoch:
    """One epoch of one stream. pending + held + done = [0, length), without overlap."""

    def __init__(self, length: int) -> None:
        self.length = length
        self.pending = Spans((0, length))
        self.done = Spans()
        self.held: dict[Incarnation, Spans] = {}

    @property
    def complete(self) -> bool:
        """Whether every sample is acknowledged."""
        return self.done.total == self.length

    def held_by_others(self, worker: Incarnation) -> bool:
        """Whether ranges may still come back from somebody else."""
        return any(spans for holder, spans in self.held.items() if holder != worker)

    def finish(self, begin: int, end: int) -> None:
        """Mark [begin, end) done, wherever it was.

        After a restart a worker acknowledges ranges that this coordinator never leased to it, or that it has since
        leased to somebody else: the work is done all the same.
        """
        self.pending.remove(begin, end)
        for spans in self.held.values():
            spans.remove(begin, end)
        self.done.add(begin, end)

    def give_back(self, worker: Incarnation, begin: int, end: int) -> None:
        """Requeue what `worker` holds of [begin, end)."""
        for span in self.held.get(worker, Spans()).remove(begin, end):
            self.pending.add(*span)

    def validate(self) -> None:
        """Assert the class invariant."""
        parts = [span for spans in (self.pending, self.done, *self.held.values()) for span in spans]
        assert sum(end - begin for begin, end in parts) == self.length, (self.length, parts)
        joined = Spans(*parts)
        assert joined.total == self.length and list(joined) == ([(0, self.length)] if self.length else []), parts


class Stream:
    """One `worker.epochs(...)` call. Epochs exist from their first use until they are complete."""

    def __init__(self, spec: StreamSpec) -> None:
        self.spec = spec
        self.epochs: dict[int, Epoch] = {}
        self.first = 0 if spec.length else spec.epochs
        """Oldest epoch with samples that are not acknowledged; `spec.epochs` at the end."""
        self.samples = 0
        """Acknowledged, over all epochs."""
        self.paces = Paces()

    @property
    def complete(self) -> bool:
        """Whether every sample of every epoch is acknowledged."""
        return self.first >= self.spec.epochs

    def epoch(self, number: int) -> Epoch | None:
        """The epoch, made if needed; None when it is complete."""
        if number < self.first or number >= self.spec.epochs:
            return None
        epoch = self.epochs.setdefault(number, Epoch(self.spec.length))
        return None if epoch.complete else epoch

    def left_for_others(self, worker: Incarnation, number: int, barrier: bool) -> int:
        """Samples that others could do while `worker` does a batch of epoch `number`: up to the next barrier."""
        left = self.spec.length * (0 if barrier else self.spec.epochs - 1 - number)
        epoch = self.epochs[number]
        return left + epoch.pending.total + sum(held.total for who, held in epoch.held.items() if who != worker)

    def finish(self, epoch: int, begin: int, end: int) -> int:
        """Mark samples done; returns how many of them were not yet."""
        table = self.epoch(epoch)
        if table is None:
            return 0
        before = table.done.total
        table.finish(begin, end)
        fresh = table.done.total - before
        self.samples += fresh
        while self.first < self.spec.epochs and (oldest := self.epochs.get(self.first)) and oldest.complete:
            del self.epochs[self.first]
            self.first += 1
        return fresh


class DataShards:
    """All streams of a job. Not thread-safe; reads no clock."""

    def __init__(self, on_done: Callable[[DataRange, bool], None]) -> None:
        self.streams: list[Stream] = []
        self._on_done = on_done
        """Told of every range newly acknowledged, and whether that completes its epoch."""

    def open(self, spec: StreamSpec) -> tuple[int, bool]:
        """Open a stream, or check it against the open one; returns (oldest unfinished epoch, is new).

        Raises `Refused` when the workers' calls differ.
        """
        if spec.stream < len(self.streams):
            _check_same(self.streams[spec.stream].spec, spec)
            return self.streams[spec.stream].first, False
        if spec.stream != len(self.streams) or spec.stream >= MAX_STREAMS:
            raise WireError(
                f"stream {spec.stream} opened, but the next one is {len(self.streams)} (limit {MAX_STREAMS})"
            )
        self.streams.append(Stream(spec))
        return self.streams[-1].first, True

    def lease(self, worker: Incarnation, ask: LeaseAsk, *, workers: int, now: float) -> Lease:
        """Lease the next range of the oldest epoch, up to `ask.epoch`, that has one; see `LeaseVerdict`.

        `workers` = live workers: near an epoch's end ranges shrink, so that nobody sits on the last ones.
        """
        stream = self._checked(ask)
        stream.paces.note(worker, ask)
        for number in range(stream.first, min(ask.epoch, stream.spec.epochs - 1) + 1):
            lease = self._lease_from(stream, number, worker, ask, workers, now)
            if lease is not None:
                return lease
            if ask.ahead and (epoch := stream.epoch(number)) is not None and epoch.pending:
                break  # it is at work on this one, and will have more of it
        return Lease(verdict=self._verdict(stream, worker, ask))

    def finish(self, done: DataRange) -> None:
        """Acknowledge a range; again, or of an epoch long complete, is fine. Raises `WireError` out of bounds."""
        stream = self._stream_of(done)
        if stream.finish(done.epoch, done.begin, done.end):
            table = stream.epoch(done.epoch)
            self._on_done(done, table is None)

    def give_back(self, worker: Incarnation, returned: DataRange) -> None:
        """Requeue what `worker` holds of a range. Raises `WireError` out of bounds."""
        epoch = self._stream_of(returned).epoch(returned.epoch)
        if epoch is not None:
            epoch.give_back(worker, returned.begin, returned.end)

    def requeue(self, worker: Incarnation) -> int:
        """The worker is gone: everything it holds is pending again. Returns how many samples that is."""
        count = 0
        for stream in self.streams:
            stream.paces.forget(worker)
            for epoch in stream.epochs.values():
                for begin, end in epoch.held.pop(worker, ()):
                    epoch.pending.add(begin, end)
                    count += end - begin
        return count

    def holders(self) -> set[Incarnation]:
        """Workers with unacknowledged ranges."""
        tables = (epoch for stream in self.streams for epoch in stream.epochs.values())
        return {worker for epoch in tables for worker, spans in epoch.held.items() if spans}

    @property
    def complete(self) -> bool:
        """Whether every stream has ended; true without streams."""
        return all(stream.complete for stream in self.streams)

    @property
    def samples(self) -> int:
        """Acknowledged samples of all streams."""
        return sum(stream.samples for stream in self.streams)

    @property
    def samples_expected(self) -> int:
        """Samples of all epochs of all open streams."""
        return sum(stream.spec.length * stream.spec.epochs for stream in self.streams)

    def validate(self) -> None:
        """Assert the invariants of every stream and epoch."""
        for stream in self.streams:
            assert 0 <= stream.first <= stream.spec.epochs
            assert all(stream.first <= number < stream.spec.epochs for number in stream.epochs)
            open_done = sum(epoch.done.total for epoch in stream.epochs.values())
            assert stream.samples == min(stream.first, stream.spec.epochs) * stream.spec.length + open_done
            for epoch in stream.epochs.values():
                epoch.validate()

    def _lease_from(
        self, stream: Stream, number: int, worker: Incarnation, ask: LeaseAsk, workers: int, now: float
    ) -> Lease | None:
        while (epoch := stream.epoch(number)) is not None and epoch.pending:
            batches = stream.paces.most_batches(worker, ask, pending=epoch.pending.total, workers=workers)
            left = stream.left_for_others(worker, number, ask.barrier)
            if not batches or stream.paces.leaves_to_others(worker, ask, left=left, now=now):
                return None
            begin, end = next(iter(epoch.pending))
            piece = cut(begin, end, is_tail=end == epoch.length, ask=ask, batches=batches)
            if piece.dropped:
                dropped = DataRange(stream=ask.stream, epoch=number, begin=piece.end - piece.dropped, end=piece.end)
                self.finish(dropped)
            leased_end = piece.end - piece.dropped
            if leased_end > begin:
                epoch.pending.remove(begin, leased_end)
                epoch.held.setdefault(worker, Spans()).add(begin, leased_end)
                leased = DataRange(stream=ask.stream, epoch=number, begin=begin, end=leased_end)
                return Lease(verdict=LeaseVerdict.RANGE, range=leased, batch_sizes=piece.sizes)
        return None

    def _verdict(self, stream: Stream, worker: Incarnation, ask: LeaseAsk) -> LeaseVerdict:
        if stream.complete:
            return LeaseVerdict.STREAM_END
        if ask.ahead or ask.barrier or ask.epoch >= stream.spec.epochs - 1:
            older = [stream.epoch(number) for number in range(stream.first, min(ask.epoch, stream.spec.epochs - 1) + 1)]
            # What only the caller itself holds can't come back to it: waiting for that would be for ever.
            if any(epoch is not None and (epoch.pending or epoch.held_by_others(worker)) for epoch in older):
                return LeaseVerdict.WAIT
        return LeaseVerdict.EPOCH_END

    def _checked(self, ask: LeaseAsk) -> Stream:
        if not 0 <= ask.stream < len(self.streams):
            raise WireError(f"stream {ask.stream} is not open; call open_stream first")
        if ask.batch_size < 1 or ask.batches < 1 or ask.epoch < 0 or ask.ahead < 0 or not ask.batch_s >= 0:
            raise WireError(
                f"lease of {ask.batches} batches of {ask.batch_size} samples, epoch {ask.epoch}: not possible"
            )
        if ask.last not in LAST:
            raise WireError(f"last={ask.last!r} is not one of {', '.join(LAST)}")
        return self.streams[ask.stream]

    def _stream_of(self, part: DataRange) -> Stream:
        if not 0 <= part.stream < len(self.streams):
            raise WireError(f"stream {part.stream} is not open")
        spec = self.streams[part.stream].spec
        if not (0 <= part.epoch < spec.epochs and 0 <= part.begin < part.end <= spec.length):
            raise WireError(f"{part} is outside of its stream ({spec.epochs} epochs of {spec.length} samples)")
        return self.streams[part.stream]


def _check_same(known: StreamSpec, other: StreamSpec) -> None:
    for name in ("length", "seed", "epochs", "shuffle"):
        expected, got = getattr(known, name), getattr(other, name)
        if expected != got:
            raise Refused(
                f"epochs() call number {other.stream} has {name}={got}, but the job's other workers use {expected}; "
                "every worker must iterate over the same data"
            )
