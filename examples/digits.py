"""Train a small convolutional network on scikit-learn's handwritten digits: 1,797 images of 8 × 8 pixels, 80/20 split.

The same script runs alone, on a local cluster, and on many hosts:

    python examples/digits.py
    psctl local --servers 2 --workers 2 examples/digits.py
    psctl worker --coordinator HOST:PORT examples/digits.py

With N asynchronous workers a gradient is about N - 1 steps old when it is applied. Adam takes the default learning rate
with up to 4 workers or so; with many more, make it smaller.
"""

from __future__ import annotations

import argparse
import math

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

import workers


def main() -> None:
    """Train, then evaluate on weights pulled from the servers."""
    options = parse()
    torch.manual_seed(options.seed)  # the first worker's initial weights count; others take them
    (train_x, train_y), (test_x, test_y) = digits(options.seed)

    with workers.join() as worker:
        model = build()
        optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr)
        worker.attach(model, optimizer)

        stream = worker.epochs(
            (train_x, train_y), batch_size=options.batch_size, count=options.epochs, seed=options.seed
        )
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
        accuracy = evaluate(model, test_x, test_y)
        worker.report(test_accuracy=accuracy)
        print(f"test accuracy {accuracy:.4f} after {step} steps of this worker")


def parse() -> argparse.Namespace:
    """Command-line options."""
    parser = argparse.ArgumentParser(description="Train on handwritten digits.")
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--lr", type=float, default=4e-3, help="learning rate at the start; it falls to 0 by a cosine")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def digits(seed: int) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """(images, labels) for training and for testing; images are N × 1 × 8 × 8 in [-1, 1]."""
    data = load_digits()
    images = torch.tensor(data.images, dtype=torch.float32).unsqueeze(1) / 8 - 1
    labels = torch.tensor(data.target)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed))
    cut = len(order) * 8 // 10
    train, test = order[:cut], order[cut:]
    return (images[train], labels[train]), (images[test], labels[test])


def build() -> nn.Module:
    """Two convolutions and two linear layers: 38,282 parameters."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(),
        nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(512, 64), nn.ReLU(), nn.Linear(64, 10),
    )  # fmt: skip


def set_lr(optimizer: torch.optim.Optimizer, start: float, done: float) -> None:
    """Cosine from `start` to 0 over `done` in [0, 1]: by epochs, which all workers share, not by their own steps."""
    for group in optimizer.param_groups:
        group["lr"] = start * (1 + math.cos(math.pi * done)) / 2


@torch.no_grad()
def evaluate(model: nn.Module, images: Tensor, labels: Tensor) -> float:
    """Share of right answers."""
    return (model(images).argmax(dim=1) == labels).float().mean().item()


if __name__ == "__main__":
    main()
