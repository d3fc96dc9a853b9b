"""A tensor of more than 2 GiB goes to the servers and back: no size or offset is cut to 32 bits."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn
from torch.optim import SGD

from ps.alone import LocalJob, settings
from workers import Worker
from workers.config import WorkerConfig

ELEMS = 2**29 + 7
"""Of float32: a little more than 2 GiB."""

NEEDED_GIB = 14
"""Weights, gradient, staging, the server's weights and its reply, and the initial ones on their way."""


def available_gib() -> float:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) / 2**20
    return 0.0


@pytest.mark.slow
@pytest.mark.skipif(available_gib() < NEEDED_GIB, reason=f"needs {NEEDED_GIB} GiB of free memory")
@pytest.mark.timeout(600)
def test_more_than_two_gib_survive_a_step() -> None:
    """One SGD step on a vector whose gradient differs everywhere near the ends and the 2 GiB mark."""
    model = nn.ParameterList([nn.Parameter(torch.zeros(ELEMS))])
    (param,) = model.parameters()
    marks = [0, 1, 2**28, 2**29 - 1, 2**29, ELEMS - 1]
    with Worker(LocalJob(servers=1, settings=settings()).member(), WorkerConfig()) as worker:
        optimizer = worker.attach(model, SGD([param], lr=1.0))
        param.grad = torch.zeros(ELEMS)
        for value, at in enumerate(marks, start=1):
            param.grad[at] = value
        optimizer.step()
        assert param.detach()[marks].tolist() == [-float(value) for value in range(1, len(marks) + 1)]
        assert int(param.detach().count_nonzero()) == len(marks)
