"""Loader processes in a real job: the script's own `DataLoader`s, and those behind `epochs`."""

from __future__ import annotations

from pathlib import Path

from tests.support import loaders, train
from tests.support.cluster import Local

SCRIPT = Path(loaders.__file__)


def test_data_loaders_of_the_script(tmp_path: Path) -> None:
    """fork and spawn, persistent or not, made before `attach` and after it: they work, and end with the job."""
    with Local(SCRIPT, tmp_path, arguments=["own", str(tmp_path)]) as local:
        assert local.wait() == 0, local.out + local.err
    assert local.summary()["final"]["steps"] == local.summary()["pushes"]


def test_each_sample_once_through_loader_processes(tmp_path: Path) -> None:
    """Two workers with two loader processes each, started by a forkserver: each sample exactly once per epoch."""
    with Local(SCRIPT, tmp_path, servers=2, workers=2, arguments=["leased", str(tmp_path)]) as local:
        assert local.wait() == 0, local.out + local.err
    counts = train.seen(tmp_path)
    assert sum(counts.values(), start=type(counts[0])()) == dict.fromkeys(range(loaders.SAMPLES), 2)
    assert local.summary()["samples"] == 2 * loaders.SAMPLES
