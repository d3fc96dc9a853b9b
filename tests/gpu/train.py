"""A training script for a real cluster: the first worker trains on a GPU, all others on the CPU."""

from __future__ import annotations

import torch
from torch import nn
from torch.autograd import backward
from torch.nn.functional import mse_loss
from torch.optim import AdamW

import workers


def main() -> None:
    """Fit a fixed function; report the first and the last loss."""
    torch.manual_seed(0)
    inputs = torch.randn(512, 16)
    targets = torch.tanh(inputs @ torch.randn(16, 4))
    with workers.join() as worker:
        first = worker.name.endswith("-0") or worker.alone
        device = torch.device("cuda" if first else "cpu")
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(16, 256), nn.Tanh(), nn.Linear(256, 4)).to(device)
        optimizer = worker.attach(model, AdamW(model.parameters(), lr=3e-3))
        losses = []
        for epoch in worker.epochs((inputs, targets), batch_size=16, count=10):
            for batch in epoch:
                x, y = batch
                optimizer.zero_grad()
                backward(mse_loss(model(x.to(device)), y.to(device)))
                optimizer.step()
                losses.append(mse_loss(model(inputs.to(device)), targets.to(device)).item())
        worker.report(**{f"first_loss_{device.type}": losses[0], f"last_loss_{device.type}": losses[-1]})


if __name__ == "__main__":
    main()
