"""A worker with a model, alone: what attach, step and pull promise beyond equal numbers."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import backward
from torch.optim import SGD, Optimizer

from ps.alone import LocalJob
from ps.errors import LocalWeightEdit, ModelMismatch, NonFiniteGradient, PsError, UnsupportedError
from tests.support.models import Mlp, batches
from tests.support.oracle import loss_of, weights
from workers import Worker, WorkerDrained
from workers.config import WorkerConfig


@pytest.fixture
def job() -> LocalJob:
    return LocalJob(servers=2)


@pytest.fixture
def worker(job: LocalJob) -> Iterator[Worker]:
    with Worker(job.member(), WorkerConfig()) as worker:
        yield worker


def sgd(model: nn.Module) -> Optimizer:
    return SGD(model.parameters(), lr=0.1)


def train(model: nn.Module, optimizer: Optimizer, steps: int = 1) -> None:
    for x, y in batches(steps):
        optimizer.zero_grad()
        backward(loss_of(model, x, y))
        optimizer.step()


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a)


def test_attach_returns_the_same_object_and_leaves_the_first_workers_weights(worker: Worker) -> None:
    """The first worker's own weights are the job's; nothing about them changes."""
    model = Mlp()
    before = weights(model)
    optimizer = sgd(model)
    assert worker.attach(model, optimizer) is optimizer
    assert same(weights(model), before)


def test_a_second_attach_is_refused(worker: Worker) -> None:
    """One model and one optimizer per job; also an optimizer that is attached already, to this or another worker."""
    model = Mlp()
    optimizer = sgd(model)
    worker.attach(model, optimizer)
    with pytest.raises(UnsupportedError, match="was called already"):
        worker.attach(Mlp(), optimizer)
    with Worker(LocalJob().member(), WorkerConfig()) as other, pytest.raises(UnsupportedError, match="is attached"):
        other.attach(model, optimizer)


def test_a_different_model_is_refused_and_stays_local(job: LocalJob, worker: Worker) -> None:
    """The second worker's error names the difference; its optimizer is as it was."""
    worker.attach(*(lambda model: (model, sgd(model)))(Mlp()))
    model = Mlp(width=25)
    optimizer = sgd(model)
    with Worker(job.member(), WorkerConfig()) as other:
        with pytest.raises(ModelMismatch, match=r"'body.0.weight' \[25, 7\]"):
            other.attach(model, optimizer)
        assert type(optimizer) is SGD
        train(model, optimizer)


def clamp(model: Mlp) -> None:
    with torch.no_grad():
        model.head.weight.clamp_(-0.01, 0.01)


def reinitialise(model: Mlp) -> None:
    nn.init.zeros_(model.head.weight)


def load_head(model: Mlp) -> None:
    model.head.load_state_dict(nn.Linear(24, 3).state_dict())


@pytest.mark.parametrize("edit", [clamp, reinitialise, load_head])
def test_local_edits_are_noticed_by_name_and_undone_by_pull(worker: Worker, edit: Callable[[Mlp], None]) -> None:
    """An edit between steps would be overwritten silently; it raises before anything is sent, and pull repairs."""
    model = Mlp()
    optimizer = sgd(model)
    worker.attach(model, optimizer)
    train(model, optimizer)
    before = weights(model)
    edit(model)
    with pytest.raises(LocalWeightEdit) as caught:
        optimizer.step()
    assert str(caught.value) == (
        "weights of 'head.weight' were changed locally before step 1: the servers own the weights and would overwrite "
        "the change. Change weights before attach(), load others for everybody with worker.load(state_dict), or call "
        "worker.pull() to take the servers' again"
    )
    worker.pull()
    assert same(weights(model), before)
    train(model, optimizer)
    assert worker.global_step == 2


def test_non_finite_gradients_stop_before_anything_is_sent(worker: Worker) -> None:
    """One decision for all shards: the parameter and the step are named, weights are unchanged, training may go on."""
    model = Mlp()
    optimizer = sgd(model)
    worker.attach(model, optimizer)
    train(model, optimizer)
    before = weights(model)
    assert model.head.bias.grad is not None
    for value in (float("nan"), float("inf")):
        model.head.bias.grad[1] = value
        with pytest.raises(NonFiniteGradient, match=r"'head.bias' .* step 1"):
            optimizer.step()
    worker.pull()
    assert same(weights(model), before) and worker.global_step == 1
    model.head.bias.grad = None  # what was staged for it must not count as a gradient of this step
    optimizer.step()
    assert worker.global_step == 2 and torch.equal(model.head.bias, before["head.bias"])


def test_weights_written_under_autograd_are_noticed(worker: Worker) -> None:
    """Copy-in goes through the version counters: a backward through weights that a step replaced is an error."""
    model = nn.Linear(2, 2, bias=False)
    optimizer = sgd(model)
    worker.attach(model, optimizer)
    loss = model.weight.square().sum()
    model.weight.grad = torch.ones(2, 2)
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        backward(loss)


def test_local_buffers_stay_local(job: LocalJob, worker: Worker) -> None:
    """With that policy BatchNorm statistics are each worker's own."""
    model = nn.Sequential(nn.Linear(7, 3), nn.BatchNorm1d(3))
    twin = copy.deepcopy(model)
    worker.attach(model, sgd(model), buffers="local")
    with Worker(job.member(), WorkerConfig()) as other:
        optimizer = sgd(twin)
        other.attach(twin, optimizer, buffers="local")
        train(twin, optimizer)
        worker.pull()
        mine, theirs = model.state_dict(), twin.state_dict()
        assert torch.equal(mine["0.weight"], theirs["0.weight"])
        assert not torch.equal(mine["1.running_mean"], theirs["1.running_mean"])


def test_copies_of_an_attached_model_are_plain(worker: Worker) -> None:
    """deepcopy, as EMA does it, works: nothing of the worker hangs on the model."""
    model = Mlp()
    optimizer = sgd(model)
    worker.attach(model, optimizer)
    train(model, optimizer)
    assert same(weights(copy.deepcopy(model)), weights(model))
    torch.optim.swa_utils.AveragedModel(model).update_parameters(model)


def test_draining_without_a_data_stream_ends_after_the_step(job: LocalJob, worker: Worker) -> None:
    """The step is finished, then the worker leaves: `step()` raises the exit."""
    with Worker(job.member(), WorkerConfig()) as other:
        model = Mlp()
        optimizer = sgd(model)
        other.attach(model, optimizer)
        other.lifecycle.request_drain("test")
        with pytest.raises(WorkerDrained):
            train(model, optimizer)
        assert other.global_step == 1
        with pytest.raises(PsError, match="has left the job"):
            optimizer.step()


def test_samples_and_steps_are_counted(worker: Worker) -> None:
    """What heartbeats tell: pushes, and the samples that they cover; a skipped batch counts with the next push."""
    model = nn.Linear(1, 1)
    optimizer = sgd(model)
    worker.attach(model, optimizer)
    for epoch in worker.epochs(torch.ones(12, 1), 3):
        for number, x in enumerate(epoch):
            if number == 1:
                continue
            assert isinstance(x, Tensor)
            optimizer.zero_grad()
            backward(model(x).sum())
            optimizer.step()
    assert worker.lifecycle.progress().steps == 3
    assert worker.lifecycle.progress().samples == 12


def test_data_is_acknowledged_when_its_push_is_applied(job: LocalJob, worker: Worker) -> None:
    """A batch that was pushed is done even if the loop is left right after; one that was not is handed back."""
    model = nn.Linear(1, 1)
    optimizer = sgd(model)
    worker.attach(model, optimizer)
    (epoch,) = worker.epochs(torch.ones(8, 1), 2)
    for number, x in enumerate(epoch):
        assert isinstance(x, Tensor)
        if number == 2:
            break
        optimizer.zero_grad()
        backward(model(x).sum())
        optimizer.step()
    assert job.state.samples == 4


def test_an_interrupted_step_makes_the_worker_unusable(worker: Worker, monkeypatch: pytest.MonkeyPatch) -> None:
    """After Ctrl-C in the middle of a push it is unknown who applied it: the next step says so instead of going on."""
    model = Mlp()
    optimizer = sgd(model)
    worker.attach(model, optimizer)

    def interrupt() -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr("workers.exchange.Exchange._pause", lambda *_: None)
        patch.setattr("workers.exchange.Exchange._land", lambda *_: interrupt())
        train(model, optimizer)
    with pytest.raises(PsError, match="KeyboardInterrupt"):
        train(model, optimizer)
