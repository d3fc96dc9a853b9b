"""A model of thousands of tiny tensors: few shards and messages, and bitwise plain PyTorch."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.optim import AdamW

from ps.alone import LocalJob, settings
from workers import Worker
from workers.config import WorkerConfig

COUNT = 5000


def tiny() -> list[nn.Parameter]:
    """Parameters of 1 to 7 elements with none, one or two dimensions."""
    generator = torch.Generator().manual_seed(1)
    shapes: list[tuple[int, ...]] = [(), (7,), (2, 3), (1,), (1, 1)]
    return [nn.Parameter(torch.randn(shapes[index % 5], generator=generator)) for index in range(COUNT)]


def gradients(params: list[nn.Parameter], step: int) -> list[Tensor | None]:
    """Of all parameters but every 997th, in odd steps."""
    return [
        None if step % 2 and index % 997 == 0 else torch.full_like(param, (index % 13 - 6) / 8)
        for index, param in enumerate(params)
    ]


def test_thousands_of_tiny_tensors() -> None:
    """Three steps over two servers: not one bit differs, and shards are far fewer than tensors."""
    local, served = tiny(), tiny()
    oracle = AdamW(local, lr=0.01)
    job = LocalJob(servers=2, settings=settings(exact=True))
    with Worker(job.member(), WorkerConfig()) as worker:
        optimizer = worker.attach(nn.ParameterList(served), AdamW(served, lr=0.01))
        for step in range(3):
            for params in (local, served):
                for param, grad in zip(params, gradients(params, step), strict=True):
                    param.grad = grad
            oracle.step()
            optimizer.step()
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(served, local, strict=True))
    plan = job.state.model.plan
    assert plan is not None and len(plan.shards) < 64
