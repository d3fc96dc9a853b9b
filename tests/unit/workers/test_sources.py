"""Options of loading: checked by name, and what they come to."""

from __future__ import annotations

import pytest
import torch
from torch.utils.data import TensorDataset

from ps.errors import ConfigError
from workers.loader import Loader, source_of
from workers.sources import InMemory, Loading, loader_seed


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"num_workers": -1}, "num_workers=-1.*must not be negative"),
        ({"prefetch_factor": 0}, "prefetch_factor=0.*must be at least 1"),
        ({"multiprocessing_context": "thread"}, "multiprocessing_context='thread'.*forkserver, spawn, fork"),
    ],
)
def test_wrong_options_are_named(wrong: dict[str, object], words: str) -> None:
    """Before anything is started."""
    with pytest.raises(ConfigError, match=words):
        Loading(**wrong)  # type: ignore[arg-type]


def test_tensors_need_no_processes() -> None:
    """They are indexed in place, whatever was asked for; with a collate function they are a dataset like others."""
    rows = torch.arange(6)
    for data in (rows, (rows, rows), TensorDataset(rows)):
        assert isinstance(source_of(data, Loading(num_workers=2), 0), InMemory)
    assert isinstance(source_of(rows, Loading(collate_fn=list), 0), Loader)


def test_seeds_of_loader_processes_differ_between_workers_and_streams() -> None:
    """Else all workers of a job would augment alike; the same worker gets the same ones again."""
    seeds = {loader_seed(0, stream, worker) for stream in range(3) for worker in ("worker-0", "worker-1")}
    assert len(seeds) == 6 and loader_seed(0, 1, "worker-1") in seeds


def test_pinning_without_an_accelerator_does_nothing() -> None:
    """A script written for a GPU runs without one, and without a warning."""
    if not torch.accelerator.is_available():
        assert not Loading(pin_memory=True).pins
