"""A process group as one worker: bitwise plain PyTorch, and several groups bitwise the order that was recorded."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.autograd import backward
from torch.optim.lr_scheduler import StepLR

from ps.sharding.partition import make_plan
from tests.numerics.test_two_workers import flat
from tests.support.models import Mlp
from tests.support.oracle import loss_of
from tests.support.polling import assert_eventually
from tests.support.ranks import BATCH, SAMPLES, SEED, dataset, optimizer_for, record, start_group
from tests.support.zygote import END_S, Zygote
from workers import permutation
from workers.signature import describe

SHARD_BYTES = 256
EPOCHS = 2
RANKS = 2


@pytest.fixture(scope="module")
def zygote(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Zygote]:
    with Zygote(tmp_path_factory.mktemp("members")) as zygote:
        yield zygote


def run_groups(zygote: Zygote, folder: Path, *names: str, script: str = "train") -> None:
    """A job with two servers, and groups of two ranks each."""
    options = {"exact": True, "shard_bytes": SHARD_BYTES}
    job = [zygote.start("coordinator", folder=str(folder), servers=2, **options)]
    assert_eventually((folder / "coordinator").exists, END_S, "the coordinator's address")
    where = (folder / "coordinator").read_text().strip()
    job += [zygote.start("server", coordinator=where, queue_bytes=1 << 30) for _ in range(2)]
    ranks = [code for name in names for code in start_group(zygote, folder, where, name, script=script, epochs=EPOCHS)]
    for code in (*ranks, *reversed(job)):
        assert zygote.wait(code) == 0, zygote.log(code)


def world_batches(epoch: int) -> list[Tensor]:
    """Sample numbers of the batches of all ranks of the only group."""
    cut = list(permutation(SEED, epoch, SAMPLES).split(RANKS * BATCH))  # type: ignore[no-untyped-call]
    if 2 * len(cut[-1]) < RANKS * BATCH:
        cut[-2:] = [torch.cat(cut[-2:])]
    return cut


def test_a_group_is_bitwise_plain_pytorch(tmp_path: Path, zygote: Zygote) -> None:
    """Two ranks with DDP: the mean of their gradients, one push for both; all ranks have the weights afterwards."""
    run_groups(zygote, tmp_path, "group")
    first, second = record(tmp_path, "group", 0), record(tmp_path, "group", 1)
    torch.manual_seed(0)
    model = Mlp()
    optimizer = optimizer_for(list(model.parameters()))
    x, y, _ = dataset()
    step = 0
    for epoch in range(EPOCHS):
        for ids in world_batches(epoch):
            parts = ids[: len(ids) // 2], ids[len(ids) // 2 :]
            assert [kept["seen"][step] for kept in (first, second)] == [(epoch, part.tolist()) for part in parts]
            halves = [grads_of(model, x[part], y[part]) for part in parts]
            for param, one, other in zip(model.parameters(), *halves, strict=True):
                param.grad = one / 2 + other / 2
            optimizer.step()
            step += 1
    assert first["step"] == second["step"] == step == len(first["seen"])
    for kept in (first, second):
        assert all(torch.equal(a, b) for a, b in zip(kept["after"], model.parameters(), strict=True))


def test_two_groups_equal_each_shards_recorded_order(tmp_path: Path, zygote: Zygote) -> None:
    """2 groups × 2 ranks, asp: every shard is what the optimizer makes of the groups' gradients in the order recorded.

    The version that a push's answer carries is the push's place in that order.
    """
    run_groups(zygote, tmp_path, "one", "two")
    kept = {(name, rank): record(tmp_path, name, rank) for name in ("one", "two") for rank in range(RANKS)}
    seen = Counter((epoch, sample) for one in kept.values() for epoch, ids in one["seen"] for sample in ids)
    assert seen == Counter((epoch, sample) for epoch in range(EPOCHS) for sample in range(SAMPLES))
    for name in ("one", "two"):  # what DDP has reduced is the same on both ranks, and so are the weights
        for key in ("grads", "start", "after"):
            pairs = zip(*(flatten(kept[name, rank][key]) for rank in range(RANKS)), strict=True)
            assert all(torch.equal(a, b) for a, b in pairs)
    model = Mlp()
    plan = make_plan(describe(model, optimizer_for(list(model.parameters()))).signature, SHARD_BYTES)
    leaders = [kept["one", 0], kept["two", 0]]
    pushes = [push for leader in leaders for push in zip(leader["versions"], leader["grads"], strict=True)]
    start = next(leader["start"] for leader in leaders)
    for shard in plan.shards:
        order = sorted(pushes, key=lambda push: push[0][shard.id])
        assert [versions[shard.id] for versions, _ in order] == list(range(1, len(pushes) + 1))
        master = flat(shard, start).requires_grad_()
        optimizer = optimizer_for([master])
        ends = {leader["versions"][-1][shard.id]: leader["after"] for leader in leaders}
        for version, (_, grads) in enumerate(order, start=1):
            master.grad = flat(shard, grads)
            optimizer.step()
            if version in ends:
                assert torch.equal(flat(shard, ends[version]), master)


def test_loops_in_a_group(tmp_path: Path, zygote: Zygote) -> None:
    """`accumulate=3` with a ragged end, `load` of rank 0's state dict, a schedule that follows the job: bitwise."""
    run_groups(zygote, tmp_path, "group", script="loops")
    first, second = record(tmp_path, "group", 0), record(tmp_path, "group", 1)
    torch.manual_seed(9)
    model = Mlp()
    params: list[Tensor] = list(model.parameters())
    optimizer = optimizer_for(params)
    scheduler = StepLR(optimizer, 2, 0.5)
    x, y, _ = dataset()
    for begin, end in ((0, 3), (3, 6), (6, 8)):
        total = [torch.zeros_like(param) for param in params]
        for step in range(begin, end):
            halves = [grads_of(model, x[at : at + 8], y[at : at + 8]) for at in (16 * step, 16 * step + 8)]
            for gradient, one, other in zip(total, *halves, strict=True):
                gradient += one / 2 + other / 2
        for param, gradient in zip(params, total, strict=True):
            param.grad = gradient / (end - begin)
        optimizer.step()
        scheduler.step()
    assert first["step"] == second["step"] == 1 + 3  # the load, and three pushes
    for kept in (first, second):
        assert torch.equal(kept["after"].pop("offset"), torch.ones(3))
        assert all(torch.equal(tensor, kept["after"][name]) for name, tensor in model.state_dict().items())


def grads_of(model: Mlp, x: Tensor, y: Tensor) -> list[Tensor]:
    """Gradients of one rank's part of a batch."""
    model.zero_grad()
    backward(loss_of(model, x, y))
    return [param.grad for param in model.parameters() if param.grad is not None]


def flatten(nested: object) -> list[Tensor]:
    """All tensors in nested lists."""
    if isinstance(nested, Tensor):
        return [nested]
    assert isinstance(nested, list)
    return [tensor for item in nested for tensor in flatten(item)]
