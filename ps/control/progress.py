"""Numbers about a job: totals from servers' and workers' heartbeats, rates, and the summary of a finished job."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

from ps.control.api import ServerProgress
from ps.types import JobState

RECENT_S = 5.0
"""What "recent" means for rates."""

Json: TypeAlias = "bool | int | float | str | list[Json] | dict[str, Json] | None"


@dataclass(frozen=True, slots=True, kw_only=True)
class Totals:
    """Sums over servers. A push goes to every shard and counts once: the shard with the most tells (one that no
    optimizer group holds gets none)."""

    pushes: int = 0
    pulls: int = 0
    bytes_pushed: int = 0
    bytes_pulled: int = 0
    staleness: Mapping[int, int] = field(default_factory=dict)
    """Staleness in versions → number of shard pushes, in rising order."""
    dropped: int = 0
    shrunk: int = 0
    spread: int = 0
    """See `ServerProgress`; of the server with the most."""


def totals(servers: Iterable[ServerProgress]) -> Totals:
    """Add up what servers report."""
    staleness: Counter[int] = Counter()
    pushes = pulls = bytes_pushed = bytes_pulled = dropped = shrunk = spread = 0
    for server in servers:
        pushes = max(pushes, *(shard.pushes for shard in server.shards), 0)
        pulls = max(pulls, *(shard.pulls for shard in server.shards), 0)
        staleness.update(server.staleness)
        bytes_pushed += server.bytes_pushed
        bytes_pulled += server.bytes_pulled
        dropped, shrunk = max(dropped, server.dropped), max(shrunk, server.shrunk)
        spread = max(spread, server.spread)
    return Totals(
        pushes=pushes, pulls=pulls, bytes_pushed=bytes_pushed, bytes_pulled=bytes_pulled,
        staleness=dict(sorted(staleness.items())), dropped=dropped, shrunk=shrunk, spread=spread,
    )  # fmt: skip


class Rates:
    """Samples per second over the last `RECENT_S` seconds."""

    def __init__(self) -> None:
        self._points: deque[tuple[float, int]] = deque()

    def add(self, now: float, samples: int) -> None:
        """Note the total at a tick."""
        self._points.append((now, samples))
        while self._points[0][0] < now - RECENT_S:
            self._points.popleft()

    def recent(self) -> float:
        """Samples per second between the oldest and the newest point kept; 0 with fewer than two."""
        if len(self._points) < 2:
            return 0.0
        (begin_s, begin), (end_s, end) = self._points[0], self._points[-1]
        return (end - begin) / (end_s - begin_s) if end_s > begin_s else 0.0


def summary(
    *,
    state: JobState,
    reason: str,
    samples: int,
    seconds: float,
    workers_seen: int,
    totals: Totals,
    reported: Mapping[str, float],
) -> dict[str, Json]:
    """Content of `summary.json`."""
    pushes = sum(totals.staleness.values())
    histogram: dict[str, Json] = {str(key): count for key, count in totals.staleness.items()}
    final: dict[str, Json] = dict(reported)
    return {
        "outcome": state.value,
        "reason": reason,
        "samples": samples,
        "seconds": round(seconds, 3),
        "samples_per_s": round(samples / seconds, 3) if seconds > 0 else 0.0,
        "pushes": totals.pushes,
        "pulls": totals.pulls,
        "bytes_pushed": totals.bytes_pushed,
        "bytes_pulled": totals.bytes_pulled,
        "staleness": {
            "mean": sum(key * count for key, count in totals.staleness.items()) / pushes if pushes else 0.0,
            "max": max(totals.staleness, default=0),
            "histogram": histogram,
        },
        "dropped_pushes": totals.dropped,
        "shrunk_rounds": totals.shrunk,
        "workers_seen": workers_seen,
        "final": final,
    }
