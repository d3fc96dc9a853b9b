"""Two workers on one table: its rows are what the class makes of their gradients in the order that was recorded."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import backward
from torch.optim import SGD, Adagrad, Optimizer, SparseAdam

from ps.alone import LocalJob, settings
from workers import Worker
from workers.config import WorkerConfig

ROWS = 40

OPTIMIZERS: dict[str, Callable[[Sequence[Tensor]], Optimizer]] = {
    "sgd": lambda params: SGD(params, lr=0.1),
    "sgd_momentum": lambda params: SGD(params, lr=0.05, momentum=0.9, nesterov=True),
    "adagrad": lambda params: Adagrad(params, lr=0.1, lr_decay=0.01),
    "sparse_adam": lambda params: SparseAdam(params, lr=0.05),
}


class Reader:
    """A worker whose batches are some rows of a table: ids overlap with the other's, and are none at times."""

    def __init__(self, job: LocalJob, name: str, seed: int) -> None:
        torch.manual_seed(seed)
        self.model = nn.ModuleList([nn.Embedding(ROWS, 3, sparse=True), nn.Embedding(7, 2, sparse=True)])
        self.start = [param.detach().clone() for param in self.model.parameters()]
        self.optimizer = OPTIMIZERS[name](list(self.model.parameters()))
        self.worker = Worker(job.member(), WorkerConfig(message_bytes=300))
        self.worker.attach(self.model, self.optimizer)
        self.chance = random.Random(seed)
        self.gradients: list[Tensor] = []

    def compute(self) -> None:
        """A gradient on the weights that this worker has."""
        self.optimizer.zero_grad()
        for table in self.model:
            assert isinstance(table, nn.Embedding)
            count = self.chance.choice([0, 1, 5, 9])
            ids = torch.tensor([self.chance.randrange(table.num_embeddings // 2) for _ in range(count)]).long()
            backward(table(ids).pow(2).sum())
        self.gradients = [param.grad.coalesce() for param in self.model.parameters() if param.grad is not None]


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_overlapping_rows_equal_the_same_gradients_in_that_order(name: str) -> None:
    """Seeded interleaving with stale gradients, over three servers: bitwise the sequential run after each push."""
    job = LocalJob(servers=3, settings=settings(exact=True, shard_bytes=128))
    readers = [Reader(job, name, seed=1), Reader(job, name, seed=2)]
    master = [param.clone() for param in readers[0].start]
    oracle = OPTIMIZERS[name](master)
    chance = random.Random(5)
    computed = [False, False]
    pushes = 0
    while pushes < 40:
        index = chance.randrange(2)
        reader = readers[index]
        computed[index] = not computed[index]
        if computed[index]:
            reader.compute()
            continue
        reader.optimizer.step()
        pushes += 1
        for param, gradient in zip(master, reader.gradients, strict=True):
            param.grad = gradient
        with torch.sparse.check_sparse_tensor_invariants(False):  # type: ignore[no-untyped-call]
            oracle.step()
        assert all(torch.equal(a, b) for a, b in zip(reader.model.parameters(), master, strict=True))
    for reader in readers:
        reader.worker.close()
