"""Runs pieces of documentation: `python -m tests.support.blocks` reads JSON {name: text} and writes {name: trouble}.

Each piece runs in a forked child, alone, with what documents take for granted; trouble is what it said when it failed,
empty when it ran and trained what it calls `model`.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import traceback

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import workers.joining  # noqa: F401  # once, before the forks
from workers import registry

SAMPLES = 96


class Net(nn.Module):
    """Four numbers in, two classes out."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2))

    def forward(self, x: Tensor) -> Tensor:
        """Logits."""
        out: Tensor = self.layers(x)
        return out


def surroundings() -> dict[str, object]:
    """The names that documents leave to the reader."""
    x = torch.randn(SAMPLES, 4)
    y = (x[:, 0] > 0).long()

    @torch.no_grad()
    def evaluate(model: nn.Module) -> float:
        return float((model(x).argmax(dim=1) == y).float().mean())

    return {
        "__name__": "__main__",
        "Net": Net, "x": x, "y": y, "dataset": TensorDataset(x, y),
        "loss_fn": nn.CrossEntropyLoss(), "evaluate": evaluate,
    }  # fmt: skip


def run(name: str, text: str) -> None:
    """Run one piece in this process; raises what it raises, and when nothing was trained or left open."""
    names = surroundings()
    torch.manual_seed(1)
    exec(compile(text, name, "exec"), names)  # noqa: S102  # that is the point
    torch.manual_seed(1)
    trained = names["model"]
    assert isinstance(trained, nn.Module)
    pairs = zip(trained.parameters(), Net().parameters(), strict=True)
    assert any(not torch.equal(after, before) for after, before in pairs), "no weight has changed"
    assert registry.current() is None, "the worker was not closed"


def run_apart(name: str, text: str) -> str:
    """Run one piece in a child; what went wrong."""
    with tempfile.TemporaryFile("w+") as said:
        child = os.fork()
        if child == 0:
            os.dup2(said.fileno(), 1)
            os.dup2(said.fileno(), 2)
            code = 1
            try:
                run(name, text)
                code = 0
            except BaseException:  # the child must not go on as its parent; the parent shows what it said
                traceback.print_exc()
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
        _, status = os.waitpid(child, 0)
        said.seek(0)
        return "" if status == 0 else f"{said.read()}\nwait status {status}"


def main() -> None:
    """Run every piece."""
    pieces: dict[str, str] = json.load(sys.stdin)
    json.dump({name: run_apart(name, text) for name, text in pieces.items()}, sys.stdout)


if __name__ == "__main__":
    main()
