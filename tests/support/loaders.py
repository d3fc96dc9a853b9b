"""A training script for tests of whole clusters that uses loader processes: the script's own, or those of `epochs`."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader, Dataset, get_worker_info

import workers

SAMPLES = 203
WAYS = (("fork", True), ("fork", False), ("spawn", True), ("spawn", False))
"""Start method, and whether the processes are persistent."""


class Numbers(Dataset[tuple[Tensor, int]]):
    """Four features and the sample's number; must be loaded by loader processes."""

    def __init__(self, length: int = 12) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        assert get_worker_info() is not None and os.environ.get("PS_TEST_MAIN") != str(os.getpid())
        return torch.full((4,), float(index) / self.length), index


def stack(samples: list[tuple[Tensor, int]]) -> tuple[Tensor, list[int]]:
    """A batch."""
    return torch.stack([features for features, _ in samples]), [number for _, number in samples]


def own_loader(method: str, persistent: bool) -> DataLoader[tuple[Tensor, int]]:
    """A loader as scripts make them."""
    return DataLoader(
        Numbers(), 3, num_workers=2, multiprocessing_context=method, persistent_workers=persistent, collate_fn=stack,
        timeout=60,
    )  # fmt: skip


class Trainer:
    """A tiny model; a step for each batch."""

    def __init__(self) -> None:
        self.model = nn.Linear(4, 3)
        self.optimizer: Optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01)

    def train(self, batches: Iterator[tuple[Tensor, list[int]]]) -> list[int]:
        """Numbers of the samples trained on."""
        seen: list[int] = []
        for features, numbers in batches:
            loss: Tensor = self.model(features).square().mean()
            loss.backward()  # type: ignore[no-untyped-call]
            self.optimizer.step()
            self.optimizer.zero_grad()
            seen += numbers
        return seen


def own_loaders(worker: workers.Worker) -> None:
    """Each way made before `attach`, with batches under way, and after it, for two epochs each."""
    trainer = Trainer()
    early = [own_loader(*way) for way in WAYS[:3]]
    under_way = [iter(loader) for loader in early]
    worker.attach(trainer.model, trainer.optimizer)
    for batches in under_way:
        assert trainer.train(batches) == list(range(12))
    late = [own_loader(*way) for way in WAYS]
    for loader in early + late[:2]:
        assert trainer.train(iter(loader)) == list(range(12))
        assert trainer.train(iter(loader)) == list(range(12))
    assert trainer.train(iter(late[3])) == list(range(12))
    worker.report(steps=4 * (3 + 2 * 5 + 1))


def leased(worker: workers.Worker, folder: Path) -> None:
    """Two epochs by `epochs(num_workers=2)`, after `attach`; writes down each batch as `tests.support.train` does."""
    trainer = Trainer()
    worker.attach(trainer.model, trainer.optimizer)
    with (folder / f"{worker.name}.{os.getpid()}.seen").open("w", buffering=1) as seen:
        for epoch in worker.epochs(Numbers(SAMPLES), 8, count=2, seed=3, num_workers=2, collate_fn=stack):
            for batch in epoch:
                numbers = trainer.train(iter([batch]))
                seen.write(" ".join(map(str, (epoch.index, *numbers))) + "\n")


def main() -> None:
    """Train."""
    parser = argparse.ArgumentParser()
    parser.add_argument("way", choices=["own", "leased"])
    parser.add_argument("folder", type=Path)
    options = parser.parse_args()
    os.environ["PS_TEST_MAIN"] = str(os.getpid())
    with workers.join() as worker:
        if options.way == "own":
            own_loaders(worker)
        else:
            leased(worker, options.folder)


if __name__ == "__main__":
    main()
