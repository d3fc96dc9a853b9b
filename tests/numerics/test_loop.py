"""The training loop around the optimizer: accumulation over epochs of leased data, and what stops a bad step."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import cast

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import backward
from torch.nn.functional import mse_loss
from torch.optim import SGD, Adam, Optimizer

from ps.alone import LocalJob, settings
from ps.errors import ConfigError, NonFiniteGradient, Refused
from tests.numerics.cases import run
from tests.support.lanes import FlatLane
from tests.support.loops import Averaged
from tests.support.models import Mlp, batches
from tests.support.oracle import loss_of, weights
from tests.support.schedulers import MAKERS
from workers import Worker, WorkerDrained, permutation
from workers.config import WorkerConfig

INPUTS = torch.randn(22, 7, generator=torch.Generator().manual_seed(3))
TARGETS = torch.randn(22, 3, generator=torch.Generator().manual_seed(4))
SIZE = 2


def small_job() -> LocalJob:
    return LocalJob(servers=2, settings=settings(shard_bytes=256))


def model_and_optimizer() -> tuple[Mlp, Optimizer]:
    torch.manual_seed(5)
    model = Mlp()
    return model, Adam(model.parameters(), lr=0.01)


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return all(torch.equal(a[key], b[key]) for key in b)


def micro_batch(model: nn.Module, optimizer: Optimizer, x: Tensor, y: Tensor) -> None:
    """What the body of the loop does for each micro-batch."""
    backward(mse_loss(model(x), y))
    optimizer.step()
    optimizer.zero_grad()


def plain(every: int, epochs: Sequence[int]) -> dict[str, Tensor]:
    """The oracle; `epochs` holds the number of micro-batches of each."""
    model, optimizer = model_and_optimizer()
    averaged = Averaged(optimizer, every)
    for number, count in enumerate(epochs):
        ids = permutation(1, number, len(INPUTS))
        for begin in range(0, count * SIZE, SIZE):
            chosen = ids[begin : begin + SIZE]
            micro_batch(model, optimizer, INPUTS[chosen], TARGETS[chosen])
        averaged.flush()
        optimizer.zero_grad()
    return weights(model)


@pytest.mark.parametrize("every", [1, 4, 11, 100])
def test_ragged_ends_of_epochs_are_flushed_as_the_mean_of_what_was_seen(every: int) -> None:
    """11 micro-batches per epoch: 4+4+3, 11, or 11 of 100. Bitwise plain PyTorch, every sample acknowledged."""
    job = small_job()
    with Worker(job.member(), WorkerConfig()) as worker:
        model, optimizer = model_and_optimizer()
        worker.attach(model, optimizer, accumulate=every)
        for epoch in worker.epochs((INPUTS, TARGETS), SIZE, count=2, seed=1):
            for x, y in cast("Sequence[tuple[Tensor, Tensor]]", epoch):
                micro_batch(model, optimizer, x, y)
            assert worker.micro_batches == 0
        worker.pull()
        assert same(weights(model), plain(every, [11, 11]))
        assert worker.global_step == 2 * -(-11 // every)
        assert job.state.samples == 44 and worker.lifecycle.progress().samples == 44


def test_leaving_an_epoch_early_drops_the_micro_batches_that_go_back() -> None:
    """What was pushed is done, the rest is handed back and counts for nobody; the next epoch starts afresh."""
    job = small_job()
    with Worker(job.member(), WorkerConfig()) as worker:
        model, optimizer = model_and_optimizer()
        worker.attach(model, optimizer, accumulate=4)
        (epoch,) = worker.epochs((INPUTS, TARGETS), SIZE, seed=1)
        for number, (x, y) in enumerate(cast("Sequence[tuple[Tensor, Tensor]]", epoch)):
            micro_batch(model, optimizer, x, y)
            if number == 5:
                break
        assert worker.micro_batches == 0 and worker.global_step == 1
        assert job.state.samples == 4 * SIZE
        assert same(weights(model), plain(4, [4]))


def test_a_drain_pushes_the_micro_batches_first() -> None:
    """SIGTERM: what was computed is not lost, its samples are done."""
    job = small_job()
    reader = Worker(job.member(), WorkerConfig())
    twin, other = model_and_optimizer()
    with Worker(job.member(), WorkerConfig()) as worker, pytest.raises(WorkerDrained):
        model, optimizer = model_and_optimizer()
        worker.attach(model, optimizer, accumulate=4)
        (epoch,) = worker.epochs((INPUTS, TARGETS), SIZE, seed=1)
        for number, (x, y) in enumerate(cast("Sequence[tuple[Tensor, Tensor]]", epoch)):
            micro_batch(model, optimizer, x, y)
            if number == 5:
                worker.lifecycle.request_drain("test")
    assert job.state.samples == 6 * SIZE
    reader.attach(twin, other)
    assert same(weights(twin), plain(4, [6])) and reader.global_step == 2
    reader.close()


@pytest.mark.parametrize("end", ["flush", "close", "error"])
def test_with_data_of_its_own_a_script_flushes_or_its_end_does(end: str) -> None:
    """Without `epochs()` nobody sees the end of an epoch: `flush()`, or a normal end of the worker; not an error."""
    job = small_job()
    worker = Worker(job.member(), WorkerConfig())
    model, optimizer = model_and_optimizer()
    worker.attach(model, optimizer, accumulate=4)
    for x, y in batches(6):
        micro_batch(model, optimizer, x, y)
    assert worker.micro_batches == 2 and worker.global_step == 1
    if end == "flush":
        worker.flush()
        worker.flush()
        assert worker.micro_batches == 0 and worker.global_step == 2
    with Worker(job.member(), WorkerConfig()) as reader:
        worker.finish(ValueError("script") if end == "error" else None)
        if end != "error":
            reader.attach(*model_and_optimizer())
            assert reader.global_step == 2


def test_steps_without_gradients_tick_the_clock() -> None:
    """As in plain PyTorch no weight moves, and no decay is applied; others see a step."""
    with Worker(small_job().member(), WorkerConfig()) as worker:
        model, optimizer = model_and_optimizer()
        worker.attach(model, optimizer)
        before = weights(model)
        for _ in range(3):
            optimizer.step()
        assert same(weights(model), before) and worker.global_step == 3


@pytest.mark.filterwarnings("ignore:Please also save")
@pytest.mark.parametrize("first", ["scheduler", "attach"])
@pytest.mark.parametrize("name", MAKERS)
def test_schedulers_take_effect_at_once(name: str, first: str) -> None:
    """Each scheduler of torch, made before or after attach, following the job or not: bitwise plain PyTorch."""
    results = []
    for attached in (False, True):
        with Worker(small_job().member(), WorkerConfig()) as worker:
            torch.manual_seed(5)
            model = nn.Linear(7, 3)
            optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
            scheduler = MAKERS[name](optimizer) if first == "scheduler" else None
            if attached:
                worker.attach(model, optimizer)
            scheduler = scheduler or MAKERS[name](optimizer)
            if attached and first == "attach":
                worker.schedule(scheduler)
            for x, y in batches(8):
                micro_batch(model, optimizer, x, y)
                scheduler.step()
            results.append(weights(model))
    assert same(*results)


@pytest.mark.parametrize("whole", [True, False])
def test_a_compiled_step_does_not_look_into_the_push(whole: bool) -> None:
    """torch.compile around the whole training step, or around `optimizer.step` alone: bitwise plain PyTorch."""
    results = []
    for attached in (False, True):
        with Worker(small_job().member(), WorkerConfig()) as worker:
            model, optimizer = model_and_optimizer()
            step: Callable[[], object] = optimizer.step
            body = micro_batch
            if attached:
                worker.attach(model, optimizer)
                step = torch.compile(lambda: optimizer.step(), backend="eager")  # noqa: B023 - called in this pass
                body = torch.compile(micro_batch, backend="eager") if whole else body
            for x, y in batches(4):
                if whole:
                    body(model, optimizer, x, y)
                    continue
                backward(loss_of(model, x, y))
                step()
                optimizer.zero_grad()
            assert worker.global_step == (4 if attached else 0)
            results.append(weights(model))
    assert same(*results)


@pytest.mark.parametrize("name", ["strided", "transformer_and_lstm", "unused_frozen_scalar_adam", "sparse_adagrad"])
def test_models_on_other_devices_go_through_flat_memory_there(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The way over a GPU's flat memory, walked on the CPU: bitwise the same."""
    made: list[FlatLane] = []

    def lane(device: torch.device) -> FlatLane:
        made.append(FlatLane())
        return made[-1]

    monkeypatch.setattr("workers.buffers.lane_for", lane)
    with Worker(small_job().member(), WorkerConfig(message_bytes=512)) as worker:
        got = weights(run(name, worker.attach))
    assert same(got, weights(run(name)))
    assert len(made) == 1 and made[0].moved and made[0].brought


def poisoned(value: float) -> Callable[[nn.Module], None]:
    def poison(model: nn.Module) -> None:
        for name in ("body.2.bias", "head.weight"):
            grad = model.get_parameter(name).grad
            assert grad is not None
            grad.view(-1)[1] = value

    return poison


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_raise_names_worker_step_and_first_parameter(value: float) -> None:
    """The default: nothing is sent, nothing moves, and training may go on."""
    with Worker(small_job().member(), WorkerConfig(name="ada")) as worker:
        model, optimizer = model_and_optimizer()
        worker.attach(model, optimizer)
        x, y = batches(1)[0]
        micro_batch(model, optimizer, x, y)
        before = weights(model)
        backward(loss_of(model, x, y))
        poisoned(value)(model)
        with pytest.raises(NonFiniteGradient) as caught:
            optimizer.step()
        assert str(caught.value) == (
            f"the gradient of 'body.2.bias' holds inf or NaN at step 1 of worker {worker.name}; nothing of this step "
            "was sent and the weights are unchanged. Skip the step (optimizer.zero_grad()), lower the learning rate, "
            "clip gradients, or say attach(..., on_nonfinite='skip')"
        )
        optimizer.zero_grad()
        micro_batch(model, optimizer, x, y)
        assert worker.global_step == 2 and not same(weights(model), before)


@pytest.mark.parametrize(("policy", "done"), [("skip", "the step is skipped"), ("zero", "such elements are set to 0")])
def test_skip_and_zero_are_logged_ever_more_rarely(policy: str, done: str, caplog: pytest.LogCaptureFixture) -> None:
    """The 1st, 2nd, 4th, 8th time, with worker, step and the first parameter; the clock ticks each time."""
    with Worker(small_job().member(), WorkerConfig(name="ada")) as worker:
        model, optimizer = model_and_optimizer()
        worker.attach(model, optimizer, on_nonfinite=policy)
        x, y = batches(1)[0]
        with caplog.at_level(logging.WARNING, "workers.nonfinite"):
            for _ in range(9):
                optimizer.zero_grad()
                backward(loss_of(model, x, y))
                poisoned(float("nan"))(model)
                optimizer.step()
        logged = [record.getMessage() for record in caplog.records]
        assert logged[0] == (
            f"the gradient of 'body.2.bias' holds inf or NaN at step 0 of worker {worker.name}; {done} (1 so far)"
        )
        assert [line.split()[-3] for line in logged] == ["(1", "(2", "(4", "(8"]
        assert worker.global_step == 9
        assert all(bool(value.isfinite().all()) for value in weights(model).values())


def test_an_unnoticed_nan_is_refused_by_the_servers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Were a worker not to look, or a wire to flip bits: the servers refuse the push, and the weights stay clean."""
    job = small_job()
    with Worker(job.member(), WorkerConfig()) as reader, Worker(job.member(), WorkerConfig()) as worker:
        model, optimizer = model_and_optimizer()
        worker.attach(model, optimizer)
        x, y = batches(1)[0]
        backward(loss_of(model, x, y))
        poisoned(float("nan"))(model)
        monkeypatch.setattr("workers.nonfinite.Screen.check", lambda self, outs, present, step: present)
        with pytest.raises(Refused, match=r"refused the push of step 0 .*gradient of body.2.bias .*holds inf or NaN"):
            optimizer.step()
        twin, other = model_and_optimizer()
        reader.attach(twin, other)
        assert all(bool(value.isfinite().all()) for value in weights(twin).values())


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"accumulate": 0}, r"attach\(accumulate=0\) must be a whole number"),
        ({"on_nonfinite": "ignore"}, r"attach\(on_nonfinite='ignore'\) must be one of: raise, skip, zero"),
    ],
)
def test_nonsense_is_refused_by_name(options: dict[str, str], text: str) -> None:
    """Before anything is opened; the optimizer is as it was."""
    with Worker(small_job().member(), WorkerConfig()) as worker:
        model, optimizer = model_and_optimizer()
        with pytest.raises(ConfigError, match=text):
            worker.attach(model, optimizer, **options)  # type: ignore[arg-type]
        assert type(optimizer) is Adam
        worker.attach(model, optimizer)
