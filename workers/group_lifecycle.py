"""News about a worker that is a process group: they count for all ranks at the same place of the script. Torch-free."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

from ps.control.api import WorkerProgress
from ps.errors import PsError
from ps.types import JobState
from workers.lifecycle import Lifecycle


@dataclass(frozen=True, slots=True)
class News:
    """What rank 0 has heard of the worker and its job, as `Lifecycle` keeps it."""

    error: PsError | None = None
    over: tuple[JobState, str] | None = None
    drain: str = ""


class GroupLifecycle(Lifecycle):
    """News as all ranks know them: taken over from rank 0 at each meeting. What arrives here waits in `live`."""

    def __init__(self) -> None:
        super().__init__()
        self.live = Lifecycle()
        self.news = self.live.news

    def heard(self) -> News:
        """What has arrived here."""
        return News(self.live._error, self.live._over, self.live._drain)

    def adopt(self, news: News) -> None:
        """From now on these are known."""
        self._error, self._over, self._drain = news.error, news.over, news.drain

    @contextlib.contextmanager
    def at_once(self) -> Iterator[None]:
        """While rank 0 acts for all, it goes by what arrives here, when it arrives: `check` raises within 0.25 s."""
        self._live_now = True
        try:
            yield
        finally:
            self._live_now = False

    _live_now = False

    def check(self) -> None:
        """See `Lifecycle.check`."""
        (self.live.check if self._live_now else super().check)()

    @property
    def draining(self) -> bool:
        """See `Lifecycle.draining`."""
        return bool(self.drain_reason)

    @property
    def drain_reason(self) -> str:
        """See `Lifecycle.drain_reason`."""
        return self.live.drain_reason if self._live_now else self._drain

    def request_drain(self, reason: str) -> bool:
        """See `Lifecycle.request_drain`; a second request finds the first one, met about or not."""
        return self.live.request_drain(reason)

    def count_step(self, samples: int) -> None:
        """See `Lifecycle.count_step`."""
        self.live.count_step(samples)

    def on_job(self, state: JobState, reason: str, release: bool) -> None:
        """See `Lifecycle.on_job`."""
        self.live.on_job(state, reason, release)

    def progress(self) -> WorkerProgress:
        """See `Lifecycle.progress`."""
        return self.live.progress()

    def _fail(self, error: PsError) -> None:
        self.live._fail(error)
