"""A contender that is a function of this process, for work that needs no network."""

from __future__ import annotations

import time
from collections.abc import Callable

from harness import Sample, busy_s

COPY = "plain copy"
"""Name of the contender that such work is compared with."""


class InProcess:
    """Steps are calls of a function. `touched_bytes` is what goodput counts for each."""

    def __init__(self, name: str, step: Callable[[], object], touched_bytes: int) -> None:
        self.name = name
        self._step = step
        self._touched_bytes = touched_bytes

    def run(self, steps: int) -> Sample:
        """See `Contender.run`."""
        busy, cpu, began = busy_s(), time.process_time(), time.perf_counter()
        for _ in range(steps):
            self._step()
        seconds, cpu_s = time.perf_counter() - began, time.process_time() - cpu
        others = max(0.0, (busy_s() - busy - cpu_s) / seconds)
        return Sample(steps, seconds, self._touched_bytes * steps, cpu_s, 0, others)

    def check(self) -> None:
        """Nothing: what is measured here has tests of its own."""
