"""Ours, with compute: a worker that trains a perceptron on random data, for the benchmark of overlap.

Kinds of steps: `compute` is forward and backward alone, `exchange` is `optimizer.step()` alone, `train` is both. The
amount of compute is set by `{"set": MICRO_BATCHES}`.
"""

from __future__ import annotations

import argparse
import inspect
import json
import sys
from collections.abc import Callable

import torch
from serve import say, timed
from torch import nn

from ps.types import Address
from workers.cluster import Cluster
from workers.config import WorkerConfig
from workers.worker import Worker

MODES = ("none", "step", "backward")


class Trainer:
    """A model, its data, and the three kinds of steps."""

    def __init__(self, width: int, depth: int, batch: int) -> None:
        torch.manual_seed(0)
        layers = [module for _ in range(depth) for module in (nn.Linear(width, width), nn.ReLU())]
        self.model = nn.Sequential(*layers)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-4)
        self.micro_batches = 1
        self._x = torch.randn(batch, width)

    def compute(self) -> None:
        """Forward and backward."""
        self.optimizer.zero_grad(set_to_none=False)
        for _ in range(self.micro_batches):
            self.model(self._x).square().mean().backward()

    def exchange(self) -> None:
        """Push and pull."""
        self.optimizer.step()

    def train(self) -> None:
        """Both."""
        self.compute()
        self.exchange()


def attach(worker: Worker, trainer: Trainer, overlap: str) -> bool:
    """Attach in a mode of overlap; False when this version has no such mode."""
    usual: Callable[..., object] = worker.attach
    if "overlap" in inspect.signature(usual).parameters:
        usual(trainer.model, trainer.optimizer, overlap=overlap)
    elif overlap != MODES[0]:
        return False
    else:
        usual(trainer.model, trainer.optimizer)
    return True


def main() -> None:
    """Join, attach, take commands, leave."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--coordinator", type=Address.parse, required=True)
    parser.add_argument("--overlap", choices=MODES, required=True)
    parser.add_argument("--width", type=int, required=True)
    parser.add_argument("--depth", type=int, required=True)
    parser.add_argument("--batch", type=int, required=True)
    options = parser.parse_args()
    torch.set_num_threads(1)
    trainer = Trainer(options.width, options.depth, options.batch)
    config = WorkerConfig(coordinator=options.coordinator)
    with Worker(Cluster(config), config) as worker:
        served = attach(worker, trainer, options.overlap)
        say(ready=served)
        if served:
            trainer.compute()
        for line in sys.stdin:
            command = json.loads(line)
            if "set" in command:
                trainer.micro_batches = int(command["set"])
                say(ok=True)
            else:
                step: Callable[[], None] = getattr(trainer, command["kind"])
                say(seconds=timed(step, int(command["run"])))


if __name__ == "__main__":
    main()
