"""Buffers over several workers: everybody who evaluates sees the same, and what is seen is the workers' average."""

from __future__ import annotations

import logging
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import backward
from torch.nn.functional import mse_loss
from torch.optim import SGD, Optimizer

from ps.alone import LocalJob, settings
from ps.errors import ConfigError, ModelMismatch
from tests.support.models import batches
from tests.support.nets import Normed
from workers import Worker
from workers.config import WorkerConfig
from workers.export import blank


def norm() -> nn.Sequential:
    """One BatchNorm layer, whose statistics are those of its input."""
    torch.manual_seed(0)
    return nn.Sequential(nn.BatchNorm1d(7), nn.Linear(7, 3))


class Script:
    """A worker on this thread, with data that are shifted by `shift`."""

    def __init__(
        self, job: LocalJob, shift: float = 0.0, make: Callable[[], nn.Module] = norm, **options: object
    ) -> None:
        self.worker = Worker(job.member(), WorkerConfig())
        self.model, self.shift = make(), shift
        self.optimizer: Optimizer = SGD(self.model.parameters(), lr=0.01)
        self.worker.attach(self.model, self.optimizer, **options)  # type: ignore[arg-type]

    def train(self, steps: int) -> None:
        for x, y in batches(steps):
            self.forward(x)
            self.optimizer.zero_grad()
            backward(mse_loss(self.model(x + self.shift), y))
            self.optimizer.step()

    def forward(self, x: Tensor) -> None:
        """Nothing more before a step."""

    def buffers(self) -> dict[str, Tensor]:
        return {name: buffer.clone() for name, buffer in self.model.named_buffers()}

    def evaluate(self) -> Tensor:
        """After `pull()`, what the model makes of some data."""
        self.worker.pull()
        with torch.no_grad():
            return torch.cat([self.model.eval()(x) for x, _ in batches(3)])


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a)


def job(servers: int = 2) -> LocalJob:
    return LocalJob(servers=servers, settings=settings(shard_bytes=64))


@pytest.mark.parametrize("every", [1, 4])
def test_evaluation_is_identical_from_any_process(every: int) -> None:
    """Two workers with different data, an idle one, one that joins afterwards: the same outputs, bit for bit."""
    where = job()
    scripts = [Script(where, shift, make=Normed, buffers_every=every) for shift in (-2.0, 2.0, 0.0)]
    for _ in range(12):
        for script in scripts[:2]:
            script.model.train()
            script.train(1)
    first, second, idle = scripts
    for script in (first, second):
        script.worker.pull()  # what they have not sent yet
    late = Script(where, make=Normed)
    outputs = [script.evaluate() for script in (first, second, idle, late)]
    assert all(torch.equal(output, outputs[0]) for output in outputs)
    shared = [name for name in first.buffers() if name not in ("mask", "seen", "last")]
    for script in (second, idle, late):
        assert all(torch.equal(first.buffers()[name], script.buffers()[name]) for name in shared)
    for script in (*scripts, late):
        script.worker.close()


def test_the_average_is_that_of_the_data_of_all_workers() -> None:
    """Shifts of -2 and +2: each worker alone would have one of them, together their statistics meet in the middle.
    The counter is a 0-dim int64 and the larger of both."""
    where = job()
    scripts = [Script(where, shift) for shift in (-2.0, 2.0)]
    for _ in range(40):
        for script in scripts:
            script.train(1)
    scripts[0].train(1)
    for script in scripts:
        script.worker.pull()
    mine, theirs = (script.buffers() for script in scripts)
    assert same(mine, theirs)
    assert float(mine["0.running_mean"].mean()) == pytest.approx(float(batches(1)[0][0].mean()), abs=0.6)
    counter = mine["0.num_batches_tracked"]
    assert counter.shape == () and counter.dtype is torch.int64 and 41 <= int(counter) <= 81
    for script in scripts:
        script.worker.close()


def test_workers_that_step_together_come_to_the_mean() -> None:
    """Both from the same base, with the same number of samples: (a + b) / 2."""
    where = job()
    one, two = Script(where, -2.0), Script(where, 2.0)
    plain = []
    for shift in (-2.0, 2.0):
        model = norm()
        model(batches(1)[0][0] + shift)
        plain.append(dict(model.named_buffers())["0.running_mean"])
    for script in (one, two):
        script.train(1)
    one.worker.pull()
    torch.testing.assert_close(one.buffers()["0.running_mean"], (plain[0] + plain[1]) / 2)
    for script in (one, two):
        script.worker.close()


def test_latest_and_local() -> None:
    """`latest`: the values of whoever pushed last. `local`: each its own; a late one starts with the first one's
    initial ones."""
    where = job()
    one, two = (Script(where, shift, buffers="latest") for shift in (-2.0, 2.0))
    one.train(2)
    two.train(1)
    kept = two.buffers()
    one.worker.pull()
    assert torch.equal(one.buffers()["0.running_var"], kept["0.running_var"])
    for script in (one, two):
        script.worker.close()
    where = job()
    one, two = (Script(where, shift, buffers="local") for shift in (-2.0, 2.0))
    one.train(3)
    kept = one.buffers()
    two.train(1)
    one.worker.pull()
    assert same(one.buffers(), kept)
    late = Script(where, buffers="local")
    assert same(late.buffers(), dict(norm().named_buffers()))
    for script in (one, two, late):
        script.worker.close()


def test_buffers_change_in_step_and_pull_only() -> None:
    """What another worker pushes meanwhile is not seen before that."""
    where = job()
    one, two = Script(where, -2.0), Script(where, 2.0)
    before = two.buffers()
    one.train(3)
    assert same(two.buffers(), before)
    two.worker.pull()
    assert same(two.buffers(), one.buffers())
    for script in (one, two):
        script.worker.close()


def test_a_buffer_with_nan_is_not_sent_and_heals(caplog: pytest.LogCaptureFixture) -> None:
    """A batch with an inf spoils one worker's statistics, not those of the job."""
    where = job()
    script = Script(where)
    script.train(2)
    good = script.buffers()
    with torch.no_grad():
        script.model(torch.full((4, 7), float("inf")))
    assert not bool(script.buffers()["0.running_mean"].isfinite().all())
    with caplog.at_level(logging.WARNING):
        script.worker.pull()
    assert torch.equal(script.buffers()["0.running_mean"], good["0.running_mean"])
    assert int(script.buffers()["0.num_batches_tracked"]) == 3
    assert "buffer '0.running_mean' holds inf or NaN and is not sent" in caplog.text
    script.worker.close()


def test_a_model_loads_what_servers_have_strictly() -> None:
    """An observer, as `psctl export` is one, has names, shapes and dtypes of the state_dict."""
    where = job()
    with_statistics = Script(where, make=Normed)
    with_statistics.train(3)
    with_statistics.worker.pull()
    expected = with_statistics.model.state_dict()
    plan = where.state.model.plan
    assert plan is not None
    names = {name: (tensor.shape, tensor.dtype) for name, tensor in blank(plan.signature).items()}
    assert names == {name: (tensor.shape, tensor.dtype) for name, tensor in expected.items()}
    with_statistics.worker.close()


def test_worker_load_takes_buffers_too() -> None:
    """A state_dict with statistics: everybody has them after the next pull."""
    where = job()
    one, two = Script(where), Script(where)
    other = nn.Sequential(nn.BatchNorm1d(7), nn.Linear(7, 3))
    other(torch.randn(20, 7) * 3)
    one.worker.load(other.state_dict())
    two.worker.pull()
    assert same(two.buffers(), dict(other.named_buffers())) and same(one.buffers(), two.buffers())
    for script in (one, two):
        script.worker.close()


def test_policies_are_part_of_the_agreement() -> None:
    """A worker with another policy is refused, by the buffer's name; so is a number of pushes that is none."""
    where = job()
    one = Script(where)
    with pytest.raises(ModelMismatch, match=r"buffer '0.running_mean' \[7\] float32 \(latest\) here, buffer"):
        Script(where, buffers="latest")
    with pytest.raises(ConfigError, match=r"attach\(buffers_every=0\) must be a whole number of pushes, at least 1"):
        Script(where, buffers_every=0)
    one.worker.close()
