"""`worker.load`: other weights for everybody, in the middle of a job."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import backward
from torch.optim import Adam, Optimizer

from ps.alone import LocalJob
from ps.errors import ConfigError, Refused
from tests.support.models import Mlp, Moody, batches
from tests.support.oracle import loss_of, weights
from workers import Worker
from workers.config import WorkerConfig


@pytest.fixture
def job() -> LocalJob:
    return LocalJob(servers=2)


@pytest.fixture
def worker(job: LocalJob) -> Iterator[Worker]:
    with Worker(job.member(), WorkerConfig()) as worker:
        yield worker


def adam(model: nn.Module) -> Optimizer:
    return Adam([param for param in model.parameters() if param.requires_grad], lr=0.01)


def train(model: nn.Module, optimizer: Optimizer, steps: int) -> None:
    for x, y in batches(steps):
        optimizer.zero_grad()
        backward(loss_of(model, x, y))
        optimizer.step()


def other(kind: type[nn.Module]) -> dict[str, Tensor]:
    torch.manual_seed(99)
    return kind().state_dict()


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a)


@pytest.mark.parametrize("kind", [Mlp, Moody])
def test_the_only_worker_loads_as_plain_pytorch_does(worker: Worker, kind: type[nn.Module]) -> None:
    """load_state_dict in mid-run: the same weights, frozen ones too, and Adam's moments go on, bit for bit."""
    results = []
    for attached in (False, True):
        torch.manual_seed(1)
        model = kind()
        optimizer = adam(model)
        if attached:
            worker.attach(model, optimizer)
        train(model, optimizer, 5)
        (worker.load if attached else model.load_state_dict)(other(kind))
        train(model, optimizer, 5)
        results.append(weights(model))
    assert same(*results)
    assert worker.global_step == 11 and worker.foreign_steps == 0


def test_before_the_first_step_it_reaches_the_other_workers(job: LocalJob, worker: Worker) -> None:
    """They have it after their next pull, or step."""
    first, second = Mlp(), Mlp()
    worker.attach(first, adam(first))
    with Worker(job.member(), WorkerConfig()) as late:
        late.attach(second, adam(second))
        worker.load(other(Mlp))
        assert not same(weights(second), other(Mlp))
        late.pull()
        assert same(weights(second), other(Mlp)) and same(weights(first), other(Mlp))


def test_later_with_several_workers_it_is_refused_and_the_weights_stay(job: LocalJob, worker: Worker) -> None:
    """The model has the servers' weights again, and training goes on."""
    model, second = Mlp(), Mlp()
    optimizer = adam(model)
    worker.attach(model, optimizer)
    with Worker(job.member(), WorkerConfig()) as late:
        late.attach(second, adam(second))
        train(model, optimizer, 2)
        before = weights(model)
        with pytest.raises(Refused, match=r"load\(\) with 2 workers in a job that has made 2 pushes"):
            worker.load(other(Mlp))
        assert same(weights(model), before)
        train(model, optimizer, 1)
    worker.load(other(Mlp))
    assert same(weights(model), other(Mlp))


def test_a_state_dict_that_does_not_fit_changes_nothing(worker: Worker) -> None:
    """torch's own error; what it had copied by then is taken back."""
    model = Mlp()
    optimizer = adam(model)
    worker.attach(model, optimizer)
    before = weights(model)
    wrong = {**other(Mlp), "head.weight": torch.zeros(1, 1)}
    with pytest.raises(RuntimeError, match=r"size mismatch for head\.weight"):
        worker.load(wrong)
    assert same(weights(model), before)
    worker.load({"head.bias": torch.ones(3)}, strict=False)
    assert torch.equal(model.head.bias, torch.ones(3)) and torch.equal(model.head.weight, before["head.weight"])
    train(model, optimizer, 1)


def test_without_a_model_there_is_nothing_to_load_into(worker: Worker) -> None:
    """By name, saying what to do."""
    with pytest.raises(ConfigError, match=r"load\(\) before attach\(\): there call model.load_state_dict"):
        worker.load({})
