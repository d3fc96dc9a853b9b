"""SnapshotPool: reply buffers, encoded once per vector of versions, shared by replies, and reused.

Live weights never go on the wire: a push would tear them while they are being sent. A reply sends a *snapshot*, a
buffer that nobody writes while any reply holds it. Each reply gets an alias of the buffer of its own; when the
transport lets go of the alias, a finalizer notes that, and the buffer is free when all its aliases are gone. The
finalizer runs on a thread of the transport, so it only appends to a deque.
"""

from __future__ import annotations

import threading
import weakref
from collections import OrderedDict, deque
from dataclasses import dataclass, field
from itertools import accumulate

import torch
from torch import Tensor

from ps.types import ShardId, Version

Layout = tuple[ShardId, ...]
"""Shards of a message, in order."""


@dataclass(frozen=True, slots=True, eq=False)
class Form:
    """What a buffer is made for."""

    layout: Layout
    sizes_bytes: tuple[int, ...]
    """Per shard; multiples of 64."""
    dtypes: tuple[torch.dtype, ...]
    device: torch.device


@dataclass(slots=True, eq=False)
class Snapshot:
    """One buffer. While a writer or a reply holds it, only that writer may change it, and only before `publish`."""

    layout: Layout
    buffer: Tensor
    """Flat uint8, owning its storage."""
    regions: tuple[Tensor, ...]
    """Views of the buffer, one per shard, in the shard's dtype."""
    versions: tuple[Version, ...] | None = None
    """Versions of the weights in it; None while it is being written, or when it holds no whole set."""
    holds: int = 0
    """Its writer, and aliases that are not back. Guarded by the pool's lock, like `versions`."""


@dataclass(slots=True)
class _Shelf:
    """Buffers of one layout, least recently written first."""

    snapshots: list[Snapshot] = field(default_factory=list)


class SnapshotPool:
    """At most `size` buffers per layout. Thread-safe; nothing blocks."""

    def __init__(self, size: int, *, max_layouts: int = 256) -> None:
        """`max_layouts` bounds the layouts that keep buffers; the least recently used idle ones go first."""
        self._size = size
        self._max_layouts = max_layouts
        self._shelves: OrderedDict[Layout, _Shelf] = OrderedDict()
        self._returned: deque[Snapshot] = deque()
        """One entry per alias that is gone; filled by finalizers, emptied under the lock."""
        self._lock = threading.Lock()  # guards everything but `_returned`; held for microseconds

    def take(self, form: Form) -> Snapshot | None:
        """A buffer to write, held by the caller; None when all of this layout are on the wire.

        End with `share` or `release`.
        """
        with self._lock:
            self._drain()
            shelf = self._shelf(form.layout)
            found = next((snapshot for snapshot in shelf.snapshots if not snapshot.holds), None)
            if found is None:
                if len(shelf.snapshots) >= self._size:
                    return None
                found = _make(form)
            else:
                shelf.snapshots.remove(found)
            shelf.snapshots.append(found)
            found.versions, found.holds = None, 1
            return found

    def find(self, layout: Layout, versions: tuple[Version, ...]) -> Snapshot | None:
        """The buffer that holds exactly these versions, held by the caller; None when there is none."""
        with self._lock:
            shelf = self._shelves.get(layout)
            for snapshot in reversed(shelf.snapshots if shelf else ()):
                if snapshot.versions == versions:
                    snapshot.holds += 1
                    return snapshot
            return None

    def publish(self, snapshot: Snapshot, versions: tuple[Version, ...]) -> None:
        """Say that the buffer is written and holds exactly `versions`: from now on `find` may share it."""
        with self._lock:
            snapshot.versions = versions

    def share(self, snapshot: Snapshot, count: int) -> list[Tensor]:
        """Aliases for `count` replies, in exchange for the caller's hold."""
        aliases = [snapshot.buffer.detach() for _ in range(count)]
        with self._lock:
            snapshot.holds += count - 1
        for alias in aliases:
            weakref.finalize(alias, self._returned.append, snapshot).atexit = False
        return aliases

    def release(self, snapshot: Snapshot) -> None:
        """Give up the caller's hold."""
        with self._lock:
            snapshot.holds -= 1

    def busy(self) -> int:
        """Buffers that are held by somebody."""
        with self._lock:
            self._drain()
            return sum(bool(s.holds) for shelf in self._shelves.values() for s in shelf.snapshots)

    def clear(self) -> None:
        """Drop all buffers; those on the wire live until their replies let go."""
        with self._lock:
            self._shelves.clear()

    def validate(self) -> None:
        """Check the invariants; raises AssertionError."""
        with self._lock:
            assert len(self._shelves) <= self._max_layouts or all(map(_in_use, self._shelves.values()))
            for layout, shelf in self._shelves.items():
                assert len(shelf.snapshots) <= self._size
                for snapshot in shelf.snapshots:
                    assert snapshot.layout == layout
                    assert snapshot.holds >= 0

    def _drain(self) -> None:
        while self._returned:
            self._returned.popleft().holds -= 1

    def _shelf(self, layout: Layout) -> _Shelf:
        shelf = self._shelves.get(layout)
        if shelf is None:
            idle = [key for key, other in self._shelves.items() if not _in_use(other)]
            for key in idle[: max(0, len(self._shelves) + 1 - self._max_layouts)]:
                del self._shelves[key]
            shelf = self._shelves[layout] = _Shelf()
        self._shelves.move_to_end(layout)
        return shelf


def _in_use(shelf: _Shelf) -> bool:
    return any(snapshot.holds for snapshot in shelf.snapshots)


def _make(form: Form) -> Snapshot:
    # Zeroed: regions of shards that a reply has no weights for must not show old memory.
    buffer = torch.zeros(sum(form.sizes_bytes), dtype=torch.uint8, device=form.device)
    ends = accumulate(form.sizes_bytes)
    regions = [
        buffer[end - size : end].view(dtype)
        for end, size, dtype in zip(ends, form.sizes_bytes, form.dtypes, strict=True)
    ]
    return Snapshot(form.layout, buffer, tuple(regions))
