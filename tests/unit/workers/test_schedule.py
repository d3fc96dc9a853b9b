"""Learning-rate schedules that follow the job: one worker sees no difference, several stand at the same place."""

from __future__ import annotations

import copy
import logging
import pickle
from collections.abc import Callable, Iterator, Sequence

import pytest
import torch
from torch import nn
from torch.optim import SGD, Optimizer, lr_scheduler
from torch.optim.lr_scheduler import LRScheduler

from ps.alone import LocalJob
from ps.errors import ConfigError, UnsupportedError
from tests.support.schedulers import MAKERS
from workers import Worker
from workers.config import WorkerConfig
from workers.schedule import position


class Script:
    """A worker with a one-parameter model."""

    def __init__(self, job: LocalJob, accumulate: int = 1) -> None:
        self.worker = Worker(job.member(), WorkerConfig())
        self.model = nn.Linear(1, 1)
        self.optimizer = SGD(self.model.parameters(), lr=0.1, momentum=0.9)
        self.worker.attach(self.model, self.optimizer, accumulate=accumulate)

    def settings(self) -> tuple[object, ...]:
        """What the next push carries."""
        group = self.optimizer.param_groups[0]
        return group["lr"], group["momentum"]

    def step(self) -> None:
        """One push."""
        self.optimizer.step()


@pytest.fixture
def job() -> LocalJob:
    return LocalJob()


@pytest.fixture
def scripts(job: LocalJob) -> Iterator[Callable[..., Script]]:
    made: list[Script] = []

    def make(accumulate: int = 1) -> Script:
        made.append(Script(job, accumulate))
        return made[-1]

    yield make
    for script in made:
        script.worker.close()


def planned(maker: Callable[[Optimizer], LRScheduler], steps: int) -> Sequence[tuple[object, ...]]:
    """The settings at each step of plain PyTorch."""
    optimizer = SGD(nn.Linear(1, 1).parameters(), lr=0.1, momentum=0.9)
    scheduler = maker(optimizer)
    found = []
    for _ in range(steps):
        found.append((optimizer.param_groups[0]["lr"], optimizer.param_groups[0]["momentum"]))
        optimizer.step()
        scheduler.step()
    return found


@pytest.mark.filterwarnings("ignore:Please also save")
@pytest.mark.parametrize("name", MAKERS)
def test_one_worker_sees_no_difference(name: str, scripts: Callable[..., Script]) -> None:
    """Each class of torch, chains too: the same values at the same steps, bit for bit."""
    script = scripts()
    scheduler = script.worker.schedule(MAKERS[name](script.optimizer))
    seen = []
    for _ in range(12):
        seen.append(script.settings())
        script.step()
        scheduler.step()
    assert seen == planned(MAKERS[name], 12)


@pytest.mark.filterwarnings("ignore:Please also save")
@pytest.mark.parametrize("name", MAKERS)
def test_two_workers_stand_at_the_jobs_step(name: str, scripts: Callable[..., Script]) -> None:
    """After its own push each worker has the values that plain PyTorch has after as many steps as the job has made."""
    plan = planned(MAKERS[name], 20)
    pair = [scripts(), scripts()]
    schedulers = [script.worker.schedule(MAKERS[name](script.optimizer)) for script in pair]
    for who in (0, 1, 1, 0, 0, 0, 1, 0, 1, 1):
        pair[who].step()
        schedulers[who].step()
        assert pair[who].settings() == plan[pair[who].worker.global_step]
    assert pair[1].worker.global_step == 10


def test_a_late_worker_starts_where_the_job_is(
    scripts: Callable[..., Script], caplog: pytest.LogCaptureFixture
) -> None:
    """No second warm-up beside others at their peak, and none of torch's warnings about the order of calls."""
    first = scripts()
    for _ in range(5):
        first.step()
    late = scripts()
    with caplog.at_level(logging.INFO, "workers"):
        scheduler = late.worker.schedule(MAKERS["one_cycle"](late.optimizer))
    assert late.settings() == planned(MAKERS["one_cycle"], 6)[5]
    assert "from step 0 to 5" in caplog.text
    late.step()
    scheduler.step()
    assert position(scheduler) == 6


def test_a_restored_scheduler_is_not_moved_twice(scripts: Callable[..., Script]) -> None:
    """Its own place counts when it is the further one; saying it again changes nothing."""
    script = scripts()
    scheduler = MAKERS["chained"](script.optimizer)
    for _ in range(3):
        script.step()
        scheduler.step()
    for _ in range(2):
        assert script.worker.schedule(scheduler) is scheduler
        assert position(scheduler) == 3


def test_others_never_carry_a_schedule_past_its_end(
    scripts: Callable[..., Script], caplog: pytest.LogCaptureFixture
) -> None:
    """With two workers the job may make a few more steps than planned: the last values stay, said once."""
    pair = [scripts(), scripts()]
    scheduler = pair[0].worker.schedule(MAKERS["one_cycle"](pair[0].optimizer))
    for _ in range(19):
        pair[1].step()
    for _ in range(3):
        pair[0].step()
        scheduler.step()
    assert position(scheduler) == 20
    assert caplog.text.count("the schedule of 20 steps is over") == 1


def test_alone_a_schedule_ends_as_in_plain_pytorch(scripts: Callable[..., Script]) -> None:
    """The scheduler's own error."""
    script = scripts()
    scheduler = script.worker.schedule(lr_scheduler.OneCycleLR(script.optimizer, 0.5, total_steps=2))
    script.step()
    scheduler.step()
    scheduler.step()
    with pytest.raises(ValueError, match="Tried to step 3 times"):
        scheduler.step()


def test_accumulated_micro_batches_are_one_step(scripts: Callable[..., Script]) -> None:
    """The loop calls step() per micro-batch; the schedule goes on with each push."""
    script = scripts(accumulate=4)
    scheduler = script.worker.schedule(MAKERS["linear"](script.optimizer))
    for _ in range(8):
        script.step()
        scheduler.step()
    assert script.worker.global_step == 2 == position(scheduler)


def test_schedules_by_epoch_start_at_the_epoch_of_joining(scripts: Callable[..., Script]) -> None:
    """A step() per epoch; whichever of schedule() and epochs() comes first."""
    data = torch.arange(4)
    first = scripts()
    epochs = first.worker.epochs(data, batch_size=2, count=4)
    for _ in range(2):
        for _ in next(epochs):
            first.step()
    for order in ("schedule", "epochs"):
        late = scripts()
        scheduler = MAKERS["exponential"](late.optimizer)
        if order == "epochs":
            late.worker.epochs(data, batch_size=2, count=4)
        assert late.worker.schedule(scheduler, per="epoch") is scheduler
        if order == "schedule":
            late.worker.epochs(data, batch_size=2, count=4)
        assert late.settings() == planned(MAKERS["exponential"], 3)[2]
        assert type(scheduler) is lr_scheduler.ExponentialLR


def test_copies_are_plain_schedulers_and_state_dicts_are_unchanged(scripts: Callable[..., Script]) -> None:
    """The place in the job is not written down with the scheduler, whose own numbers say it all."""
    script = scripts()
    plain = MAKERS["step"](script.optimizer)
    keys = plain.state_dict().keys()
    scheduler = script.worker.schedule(plain)
    assert scheduler.state_dict().keys() == keys
    for twin in (copy.deepcopy(scheduler), pickle.loads(pickle.dumps(scheduler))):
        assert type(twin) is lr_scheduler.StepLR


def test_refusals(job: LocalJob, scripts: Callable[..., Script]) -> None:
    """ReduceLROnPlateau, no model yet, an unknown unit, no scheduler at all."""
    script = scripts()
    with pytest.raises(UnsupportedError, match=r"ReduceLROnPlateau.*own metric.*step\(metric\) yourself"):
        script.worker.schedule(lr_scheduler.ReduceLROnPlateau(script.optimizer))
    with pytest.raises(ConfigError, match=r"schedule\(per='batch'\) must be one of: step, epoch"):
        script.worker.schedule(MAKERS["step"](script.optimizer), per="batch")
    with pytest.raises(TypeError, match="takes a scheduler of torch, got int"):
        script.worker.schedule(3)  # type: ignore[arg-type]
    with Worker(job.member(), WorkerConfig()) as bare, pytest.raises(ConfigError, match=r"schedule\(\) before attach"):
        bare.schedule(MAKERS["step"](script.optimizer))
