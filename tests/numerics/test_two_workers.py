"""Several workers, asp: the weights are what an optimizer makes of the gradients in the order that was recorded."""

from __future__ import annotations

import random
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor
from torch.autograd import backward
from torch.optim import AdamW, Optimizer

from ps.alone import LocalJob, settings
from ps.consistency.asp import Asp
from ps.consistency.policy import Decision, PushEvent
from ps.sharding.spec import Shard
from ps.types import Incarnation, ShardId
from tests.support.models import Mlp, batches
from tests.support.oracle import loss_of
from workers import Worker
from workers.config import WorkerConfig


class Recorder(Asp):
    """asp that notes the order in which each shard applied pushes."""

    def __init__(self) -> None:
        super().__init__()
        self.order: dict[ShardId, list[tuple[Incarnation, int]]] = {}

    def decide(self, event: PushEvent) -> Decision:
        self.order.setdefault(event.shard, []).append((event.incarnation, event.sequence))
        return super().decide(event)


def optimizer_for(params: Sequence[Tensor]) -> Optimizer:
    return AdamW(params, lr=0.01, weight_decay=0.1)


class Script:
    """A worker with its model; keeps each gradient that it pushes."""

    def __init__(self, job: LocalJob, seed: int) -> None:
        torch.manual_seed(seed)
        self.model = Mlp()
        self.start = [param.detach().clone() for param in self.model.parameters()]
        self.optimizer = optimizer_for(list(self.model.parameters()))
        self.worker = Worker(job.member(), WorkerConfig())
        self.worker.attach(self.model, self.optimizer)
        self.incarnation = next(m.incarnation for m in job.state.members if m.name == self.worker.name)
        self.gradients: list[list[Tensor]] = []
        self.data = batches(40)

    def compute(self) -> None:
        """A gradient on the weights that this worker has."""
        x, y = self.data[(7 * len(self.gradients)) % len(self.data)]
        self.optimizer.zero_grad()
        backward(loss_of(self.model, x, y))
        self.gradients.append([param.grad.clone() for param in self.model.parameters() if param.grad is not None])


def test_interleaved_workers_equal_the_same_gradients_in_that_order() -> None:
    """Two workers on one thread, seeded interleaving with stale gradients: bitwise the sequential run, always."""
    job = LocalJob(servers=2, settings=settings(shard_bytes=256))
    scripts = [Script(job, seed=1), Script(job, seed=2)]
    master = [param.clone().requires_grad_() for param in scripts[0].start]
    oracle = optimizer_for(master)
    assert all(torch.equal(a, b) for a, b in zip(scripts[1].model.parameters(), master, strict=True))
    chance = random.Random(5)
    computed = [False, False]
    for _ in range(80):
        index = chance.randrange(2)
        script = scripts[index]
        if not computed[index]:
            script.compute()
            computed[index] = True
            continue
        script.optimizer.step()
        computed[index] = False
        for param, gradient in zip(master, script.gradients[-1], strict=True):
            param.grad = gradient
        oracle.step()
        assert all(torch.equal(a, b) for a, b in zip(script.model.parameters(), master, strict=True))
    assert scripts[0].worker.global_step > 20
    for script in scripts:
        script.worker.close()


def test_concurrent_workers_equal_each_shards_recorded_order() -> None:
    """Three workers on threads of their own: every shard equals its gradients applied in the order it recorded."""
    recorders: list[Recorder] = []

    def policy() -> Recorder:
        recorders.append(Recorder())
        return recorders[-1]

    job = LocalJob(servers=2, settings=settings(shard_bytes=512), policy=policy)
    scripts = [Script(job, seed) for seed in range(3)]
    reader = Script(job, seed=9)

    def train(script: Script) -> None:
        with script.worker:
            for _ in range(25):
                script.compute()
                script.optimizer.step()

    with ThreadPoolExecutor(len(scripts)) as pool:
        list(pool.map(train, scripts, timeout=60))
    with reader.worker as worker:
        worker.pull()
    plan = job.state.model.plan
    assert plan is not None
    gradients = {
        (script.incarnation, sequence): gradient
        for script in scripts
        for sequence, gradient in enumerate(script.gradients)
    }
    orders = {shard: order for recorder in recorders for shard, order in recorder.order.items()}
    assert sorted(orders) == [shard.id for shard in plan.shards]
    for shard in plan.shards:
        assert sorted(orders[shard.id]) == sorted(gradients)
        master = flat(shard, scripts[0].start).requires_grad_()
        oracle = optimizer_for([master])
        for push in orders[shard.id]:
            master.grad = flat(shard, gradients[push])
            oracle.step()
        assert torch.equal(flat(shard, list(reader.model.parameters())), master)


def flat(shard: Shard, tensors: Sequence[Tensor]) -> Tensor:
    """What a shard holds of these parameters or gradients, padding zero."""
    out = torch.zeros(shard.numel)
    for piece in shard.pieces:
        part = tensors[piece.param].detach().reshape(-1)[piece.begin : piece.end]
        out[piece.offset : piece.offset + piece.numel] = part
    return out
