"""A rank's part of each batch, in a process group that is one worker. Torch-free, pure."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Share:
    """Which part of a batch is this process's; all of it, for a worker that is one process."""

    rank: int = 0
    ranks: int = 1

    def of(self, count: int) -> slice:
        """This rank's samples among `count`: in order, parts differ by one sample at most."""
        return slice(count * self.rank // self.ranks, count * (self.rank + 1) // self.ranks)

    def reaches(self, count: int) -> bool:
        """Whether every rank gets at least one of `count` samples."""
        return count >= self.ranks

    def label(self, name: str) -> str:
        """A name for this rank of the worker `name`."""
        return name if self.ranks == 1 else f"{name}/{self.rank}"
