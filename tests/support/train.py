"""A training script for tests of whole clusters; it writes down every sample that it was given.

`FOLDER/<worker>.<pid>.seen` has a line `<epoch> <sample> <sample> ...` for each batch whose push was applied. One
worker can be told to wait at a step, with a batch taken and not pushed, until the file `FOLDER/go` appears.
"""

from __future__ import annotations

import argparse
import os
import threading
from collections import Counter
from pathlib import Path

import torch
from torch import nn

import workers


def main() -> None:
    """Train a tiny model."""
    options = parse()
    torch.manual_seed(0)
    samples = torch.arange(options.samples)
    inputs = torch.randn(options.samples, 4)
    with workers.join() as worker:
        model = nn.Linear(4, 3)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        worker.attach(model, optimizer)
        waits = options.wait_worker == worker.name
        path = options.folder / f"{worker.name}.{os.getpid()}.seen"
        step = 0
        with path.open("w", buffering=1) as seen:
            stream = worker.epochs((inputs, samples), batch_size=options.batch_size, count=options.epochs, seed=3)
            for epoch in stream:
                for batch in epoch:
                    x, ids = batch
                    if waits and step == options.wait_step:
                        (options.folder / "waiting").touch()
                        wait_for(options.folder / "go")
                    pause(options.step_s)
                    loss: torch.Tensor = model(x).square().mean()
                    loss.backward()  # type: ignore[no-untyped-call]
                    optimizer.step()
                    optimizer.zero_grad()
                    step += 1
                    seen.write(" ".join(map(str, (epoch.index, *ids.tolist()))) + "\n")
                    if step == options.raise_step:
                        raise ValueError("raised by the script")
        worker.report(steps=step)


def parse() -> argparse.Namespace:
    """Command-line options."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--samples", type=int, default=400)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--step-s", type=float, default=0.0)
    parser.add_argument("--wait-worker", default="")
    parser.add_argument("--wait-step", type=int, default=3)
    parser.add_argument("--raise-step", type=int, default=-1)
    return parser.parse_args()


def wait_for(path: Path) -> None:
    """Wait for a file; bounded, so that a failed test leaves nothing behind."""
    for _ in range(6000):
        if path.exists():
            return
        pause(0.01)
    raise TimeoutError(path)


def pause(seconds: float) -> None:
    """Stand in for the work of a step."""
    if seconds:
        threading.Event().wait(seconds)


def seen(folder: Path) -> dict[int, Counter[int]]:
    """Epoch → how often each sample was pushed, all workers together."""
    counts: dict[int, Counter[int]] = {}
    for path in folder.glob("*.seen"):
        for line in path.read_text().splitlines():
            epoch, *samples = map(int, line.split())
            counts.setdefault(epoch, Counter()).update(samples)
    return counts


if __name__ == "__main__":
    main()
