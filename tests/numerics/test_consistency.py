"""Consistency choices: one worker of any is plain PyTorch; bsp with N workers is training on the N-fold batch."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import backward
from torch.optim import Optimizer

from ps.alone import LocalJob
from ps.control.api import JobSettings
from tests.numerics.cases import CASES, run
from tests.support.models import batches
from tests.support.oracle import loss_of, weights
from workers import Worker
from workers.config import WorkerConfig

STEPS = 10
SHARD_BYTES = 256
"""So small that tensors are split over both servers."""

Grad = Callable[[nn.Module, int], None]
"""Accumulates the gradient of one batch, by its number."""


def job_with(consistency: str, *, exact: bool = True, servers: int = 2) -> LocalJob:
    return LocalJob(
        servers=servers, settings=JobSettings(exact=exact, shard_bytes=SHARD_BYTES, consistency=consistency)
    )


@pytest.mark.parametrize("consistency", ["ssp:0", "ssp:3", "bsp", "bsp:backup=1"])
@pytest.mark.parametrize("name", ["unused_frozen_scalar_adam", "sparse_adagrad"])
def test_one_worker_is_plain_pytorch(name: str, consistency: str) -> None:
    """Bitwise: it waits for nobody, and the mean of one gradient is that gradient."""
    with Worker(job_with(consistency).member(), WorkerConfig()) as worker:
        got = weights(run(name, worker.attach))
    expected = weights(run(name))
    assert [key for key in got if not torch.equal(got[key], expected[key])] == []


def dense(model: nn.Module, number: int) -> None:
    x, y = batches(STEPS * 3)[number]
    backward(loss_of(model, x.to(next(model.parameters()).dtype), y.to(next(model.parameters()).dtype)))


class Words(nn.Module):
    """Rows of a table, and a dense layer."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(40, 8, sparse=True)
        self.out = nn.Linear(8, 1)

    def forward(self, ids: Tensor) -> Tensor:
        found: Tensor = self.out(self.table(ids))
        return found


def sparse(model: nn.Module, number: int) -> None:
    generator = torch.Generator().manual_seed(number)
    ids = torch.randint(0, 40, (12,), generator=generator)
    out: Tensor = model(ids)
    backward(out.square().sum())


class Sometimes(nn.Module):
    """Two layers, of which one is left out of every third batch."""

    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Linear(8, 3)
        self.two = nn.Linear(8, 3)


def sometimes(model: nn.Module, number: int) -> None:
    assert isinstance(model, Sometimes)
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(number))
    out: Tensor = model.one(x) if number % 3 == 1 else model.one(x) + model.two(x)
    backward(out.square().mean())


def sgd_momentum(model: nn.Module) -> Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=0.01)


def plain_sgd(model: nn.Module) -> Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05)


def adam(model: nn.Module) -> Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01)


def half(model: nn.Module) -> Optimizer:
    return torch.optim.AdamW(model.double().parameters(), lr=0.01)


N_FOLD: dict[str, tuple[Callable[[], nn.Module], Callable[[nn.Module], Optimizer], Grad]] = {
    "mlp_adamw": (CASES["adamw"].model, adam, dense),
    "mlp_sgd_momentum": (CASES["adamw"].model, sgd_momentum, dense),
    "mlp_float64": (CASES["adamw"].model, half, dense),
    "sparse_rows_sgd": (Words, plain_sgd, sparse),
    "absent_in_some_batches_adamw": (Sometimes, adam, sometimes),
}
"""What bsp must equal: model, optimizer, gradient of one batch."""


def built(name: str) -> tuple[nn.Module, Optimizer, Grad]:
    make, optimizer, grad = N_FOLD[name]
    torch.manual_seed(7)
    model = make()
    return model, optimizer(model), grad


def single_process(name: str, workers: int) -> list[dict[str, Tensor]]:
    """Weights after each step on `workers` batches: gradients accumulated in order, and divided by their number."""
    model, optimizer, grad = built(name)
    history = []
    for step in range(STEPS):
        optimizer.zero_grad()
        for index in range(workers):
            grad(model, step * workers + index)
        for param in model.parameters():
            if param.grad is not None:
                param.grad = param.grad.coalesce() / workers if param.grad.is_sparse else param.grad / workers
        optimizer.step()
        history.append(weights(model))
    return history


def several(name: str, workers: int, consistency: str, *, exact: bool) -> list[list[dict[str, Tensor]]]:
    """Weights of each worker after each of its steps."""
    job = job_with(consistency, exact=exact)
    attached = threading.Barrier(workers, timeout=60)
    scripts = [built(name) for _ in range(workers)]  # not on the threads: they share one random generator

    def train(index: int) -> list[dict[str, Tensor]]:
        model, optimizer, grad = scripts[index]
        history = []
        with members[index] as worker:
            worker.attach(model, optimizer)
            attached.wait()
            for step in range(STEPS):
                optimizer.zero_grad()
                grad(model, step * workers + index)
                optimizer.step()
                history.append(weights(model))
        return history

    members = [Worker(job.member(), WorkerConfig(message_bytes=600)) for _ in range(workers)]
    with ThreadPoolExecutor(workers) as pool:
        return list(pool.map(train, range(workers), timeout=60))


def differences(got: dict[str, Tensor], expected: dict[str, Tensor]) -> list[str]:
    assert got.keys() == expected.keys()
    return [key for key in got if not torch.equal(got[key], expected[key])]


@pytest.mark.parametrize("workers", [2, 3])
@pytest.mark.parametrize("name", N_FOLD)
def test_bsp_is_training_on_the_n_fold_batch(name: str, workers: int) -> None:
    """Bitwise under exact, at every step and every worker: sums are made in the order of workers."""
    expected = single_process(name, workers)
    for history in several(name, workers, "bsp", exact=True):
        assert [differences(got, want) for got, want in zip(history, expected, strict=True)] == [[]] * STEPS


@pytest.mark.parametrize("name", ["mlp_adamw", "sparse_rows_sgd"])
def test_bsp_with_sums_as_they_come_is_close(name: str) -> None:
    """By default gradients are summed in the order of arrival: bounded by rounding, and equal on all workers."""
    expected = single_process(name, 3)[-1]
    ends = [history[-1] for history in several(name, 3, "bsp", exact=False)]
    for key, value in expected.items():
        torch.testing.assert_close(ends[0][key], value, rtol=1e-4, atol=1e-5)
    assert differences(ends[1], ends[0]) == differences(ends[2], ends[0]) == []


def test_the_n_fold_batch_itself_differs_by_rounding_only() -> None:
    """The mean of the workers' gradients is that of one large batch, up to the order of summation inside of it."""
    model, optimizer, _ = built("mlp_sgd_momentum")
    data = batches(STEPS * 3)
    for step in range(STEPS):
        x, y = (torch.cat([data[step * 3 + index][part] for index in range(3)]) for part in range(2))
        optimizer.zero_grad()
        backward(loss_of(model, x, y))
        optimizer.step()
    expected = single_process("mlp_sgd_momentum", 3)[-1]
    for key, value in weights(model).items():
        torch.testing.assert_close(value, expected[key], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("consistency", ["bsp", "ssp:0", "ssp:2", "bsp:backup=1"])
@pytest.mark.parametrize("samples", [35, 41])
def test_ragged_data_leaves_nobody_waiting(consistency: str, samples: int) -> None:
    """Three workers, two epochs of leased data that three don't divide, ends of one and of two batches: whoever has no
    data steps aside, all samples are done, everybody gets to the end with the same weights."""
    job = job_with(consistency)
    x = torch.randn(samples, 8, generator=torch.Generator().manual_seed(0))
    members = [Worker(job.member(), WorkerConfig()) for _ in range(3)]
    attached = threading.Barrier(3, timeout=60)
    ended = threading.Barrier(3, timeout=60)

    def train(worker: Worker) -> dict[str, Tensor]:
        model = nn.Linear(8, 3)
        optimizer = worker.attach(model, plain_sgd(model))
        attached.wait()
        with worker:
            for epoch in worker.epochs(x, batch_size=4, count=2, last="short"):
                for batch in epoch:
                    optimizer.zero_grad()
                    backward(model(batch).square().mean())
                    optimizer.step()
            ended.wait()
            worker.pull()
            ended.wait()
        return weights(model)

    with ThreadPoolExecutor(3) as pool:
        ends = list(pool.map(train, members, timeout=60))
    assert job.state.samples == 2 * samples
    assert differences(ends[1], ends[0]) == differences(ends[2], ends[0]) == []


def test_hyper_parameters_of_the_lowest_numbered_contributor_hold() -> None:
    """Two workers with different learning rates: the rounds follow the first one's, as its scheduler says."""
    job = job_with("bsp")
    attached, begin = threading.Barrier(2, timeout=60), threading.Barrier(2, timeout=60)
    members = [Worker(job.member(), WorkerConfig()) for _ in range(2)]
    torch.manual_seed(7)
    models = [nn.Linear(8, 3) for _ in range(2)]
    start = weights(models[0])

    def train(index: int) -> dict[str, Tensor]:
        model = models[index]
        optimizer = torch.optim.SGD(model.parameters(), lr=(0.5, 0.25)[index])
        with members[index] as worker:
            if index == 1:
                attached.wait()
            worker.attach(model, optimizer)
            if index == 0:
                attached.wait()
            begin.wait()
            for step in range(4):
                optimizer.zero_grad()
                sometimes_linear(model, 2 * step + index)
                optimizer.step()
                optimizer.param_groups[0]["lr"] *= 0.5
        return weights(model)

    with ThreadPoolExecutor(2) as pool:
        ends = list(pool.map(train, range(2), timeout=60))
    model = nn.Linear(8, 3)
    model.load_state_dict(start)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for step in range(4):
        optimizer.zero_grad()
        for index in range(2):
            sometimes_linear(model, 2 * step + index)
        for param in model.parameters():
            assert param.grad is not None
            param.grad /= 2
        optimizer.step()
        optimizer.param_groups[0]["lr"] *= 0.5
    assert differences(ends[0], weights(model)) == differences(ends[1], weights(model)) == []


def sometimes_linear(model: nn.Module, number: int) -> None:
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(number))
    backward(model(x).square().mean())
