"""Datasets behind leased ranges: samples fetched and collated by torch's DataLoader, in this process or in others.

Loader processes live as long as the stream. They are never started by a fork of this process unless asked for, so they
hold none of its sockets and threads: `forkserver` and `spawn` are safe before and after `attach`, `fork` best before.
"""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import pickle
import signal
import warnings
from collections.abc import Iterator, Sequence
from multiprocessing.context import BaseContext
from multiprocessing.process import BaseProcess
from typing import cast

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, TensorDataset

from ps.errors import ConfigError, PsError
from workers.sources import Data, InMemory, Loading, Piece, Source, tensors_of

log = logging.getLogger(__name__)

_PRELOAD = ["__main__", "torch.utils.data"]
"""What a forkserver imports once, instead of each loader process again; the first is Python's own default."""

_KILL_S = 5.0
"""How long a killed process may take to be gone."""


def source_of(data: Data, loading: Loading, seed: int) -> Source[object]:
    """Tensors are indexed here, everything else goes through a loader, whose processes start now.

    Raises `ConfigError` when the data can't be sent to them.
    """
    tensors = tensors_of(data)
    if tensors is None:
        return Loader(cast("Dataset[object]", data), loading, seed)
    if loading.collate_fn is None:
        return InMemory(data if isinstance(data, Tensor) else tensors, pins=loading.pins)
    return Loader(cast("Dataset[object]", data if isinstance(data, Tensor) else TensorDataset(*tensors)), loading, seed)


class Loader:
    """`Source` of a map-style dataset. Its processes end with `close`, unless persistent with each epoch."""

    def __init__(self, dataset: Dataset[object], loading: Loading, seed: int) -> None:
        self.ahead = loading.num_workers * loading.prefetch_factor
        self._loading = loading
        self._plan = _Plan()
        self._loader = _data_loader(dataset, loading, self._plan, seed)
        self._iterator: Iterator[object] | None = None
        self._processes: list[BaseProcess] = []
        if loading.num_workers:
            self._begin()

    def load(self, plan: Iterator[Tensor]) -> Iterator[Piece[object]]:
        """See `Source.load`. What the dataset raises in a loader process comes with that process's traceback.

        Raises `PsError` when a loader process has died.
        """
        self._plan.ids = plan
        try:
            batches = self._begin()
            while (piece := self._next(batches)) is not None:
                yield piece
        finally:
            self._plan.ids = iter(())

    def end_epoch(self) -> None:
        """End the processes, unless they are persistent."""
        if not self._loading.persistent_workers:
            self._stop()

    def close(self) -> None:
        """End the processes: they finish the batch they are at, for 5 s each at most, then they are killed.

        An epoch that is iterated over after that starts them again.
        """
        self._stop()

    def _begin(self) -> Iterator[object]:
        """A fresh iterator over the plan; starts the processes when there are none. Those that run are kept."""
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", "Got pickle error", UserWarning)  # the error below says more
                batches: Iterator[object] = iter(self._loader)
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            if not self._loading.num_workers:
                raise
            raise ConfigError(
                f"epochs(num_workers={self._loading.num_workers}): the dataset, collate_fn or worker_init_fn can't be "
                f"sent to loader processes: {error}. Define them at the top level of a module and keep workers, "
                'lambdas and open files out of them, or give multiprocessing_context="fork"'
            ) from error
        except RuntimeError as error:
            self._explain(error)
            raise
        if self._loading.num_workers:
            self._iterator, self._processes = batches, list(getattr(batches, "_workers", []))
        return batches

    def _next(self, batches: Iterator[object]) -> Piece[object] | None:
        try:
            return Piece(next(batches))
        except StopIteration:
            return None
        except RuntimeError as error:
            self._explain(error)
            raise

    def _explain(self, error: RuntimeError) -> None:
        """Raise `PsError` if a loader process is dead."""
        dead = [process for process in self._processes if process.exitcode]
        if dead:
            raise PsError(f"epochs(num_workers={self._loading.num_workers}): {_how(dead[0])}") from error

    def _stop(self) -> None:
        iterator, self._iterator = self._iterator, None
        processes, self._processes = self._processes, []
        if iterator is None:
            return
        self._loader._iterator = None  # else it would go on with processes that have ended
        with contextlib.suppress(RuntimeError):  # a process that is dead already is what we want
            iterator._shutdown_workers()  # type: ignore[attr-defined]
        for process in processes:
            if process.is_alive():
                log.warning("loader process %s did not end; killed", process.pid)
                process.kill()
                process.join(_KILL_S)


class _Plan:
    """The DataLoader's batch sampler: lists of sample ids, as they are planned."""

    def __init__(self) -> None:
        self.ids: Iterator[Tensor] = iter(())

    def __iter__(self) -> Iterator[list[int]]:
        return self

    def __next__(self) -> list[int]:
        ids: list[int] = next(self.ids).tolist()
        return ids


def _data_loader(dataset: Dataset[object], loading: Loading, plan: _Plan, seed: int) -> DataLoader[object]:
    """The DataLoader; with a generator of its own, so that the script's random numbers stay what they are."""
    processes = loading.num_workers
    return DataLoader(
        dataset,
        batch_sampler=cast("Sequence[list[int]]", plan),
        num_workers=processes,
        collate_fn=loading.collate_fn,
        pin_memory=loading.pins,
        worker_init_fn=loading.worker_init_fn,
        multiprocessing_context=_context(loading.multiprocessing_context) if processes else None,
        generator=torch.Generator().manual_seed(seed),
        prefetch_factor=loading.prefetch_factor if processes else None,
        persistent_workers=processes > 0,
    )


def _context(method: str) -> BaseContext:
    context = multiprocessing.get_context(method)
    if method == "forkserver":
        context.set_forkserver_preload(_PRELOAD)  # no effect once the server runs
    return context


def _how(process: BaseProcess) -> str:
    """How a loader process ended, and what to look at."""
    code = process.exitcode or 0
    if code < 0:
        return (
            f"loader process {process.pid} was killed by {signal.Signals(-code).name}. If nobody did that on purpose, "
            "memory or /dev/shm may be full: use fewer loader processes or a smaller prefetch_factor"
        )
    return (
        f"loader process {process.pid} exited with code {code}; what it raised is on stderr. Loader processes import "
        'the script: it must start its work under `if __name__ == "__main__":`'
    )
