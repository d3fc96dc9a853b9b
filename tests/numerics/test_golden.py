"""One worker, asp: the weights on the servers equal those of plain PyTorch, bit for bit under exact kernels."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from ps.alone import LocalJob, settings
from ps.sharding.spec import ShardingPlan
from tests.numerics.cases import CASES, run
from tests.numerics.compare import Record, check_exact, check_fused
from tests.support.oracle import STEPS, weights
from workers import Worker
from workers.config import WorkerConfig
from workers.signature import named_params


def plan_of(job: LocalJob) -> ShardingPlan:
    """The plan of the job's model."""
    plan = job.state.model.plan
    assert plan is not None
    return plan


def small_shard_bytes(name: str) -> int:
    """So small that most tensors are split, over all servers; about ten shards."""
    params = CASES[name].model().parameters()
    return max(128, sum(param.numel() * param.element_size() for param in params) // 8)


def trained(
    name: str, *, servers: int, exact: bool, shard_bytes: int = 0, message_bytes: int = 8 << 20
) -> tuple[dict[str, Tensor], int, LocalJob]:
    """What torch-ps makes of it, as it lies on the servers at the end, after how many pushes."""
    job = LocalJob(servers=servers, settings=settings(exact=exact, shard_bytes=shard_bytes))
    with Worker(job.member(), WorkerConfig(message_bytes=message_bytes)) as worker:
        model = run(name, worker.attach)
        with torch.no_grad():
            params = dict(named_params(model))
            for spec in plan_of(job).signature.params:
                if spec.group >= 0:
                    params[spec.name].zero_()  # whatever is there afterwards came from the servers
        worker.pull()
        return weights(model), worker.global_step, job


@pytest.mark.parametrize("name", CASES)
def test_exact_is_bitwise_plain_pytorch(name: str, record_property: Record) -> None:
    """Tensors split over shards, messages and three servers: not one bit differs under exact kernels."""
    size = small_shard_bytes(name)
    got, pushes, job = trained(name, servers=3, exact=True, shard_bytes=size, message_bytes=2 * size)
    check_exact(name, "exact, 3", got, record_property)
    assert 0 < pushes <= STEPS
    pieces = [piece.param for shard in plan_of(job).shards for piece in shard.pieces]
    assert (len(pieces) > len(set(pieces))) == CASES[name].splits
    shard_map = job.state.model.shard_map
    assert shard_map is not None and len({holder.incarnation for holder in shard_map.holders}) == 3


@pytest.mark.parametrize("name", CASES)
def test_one_server_with_default_shards_is_bitwise_plain_pytorch(name: str, record_property: Record) -> None:
    """The other extreme, and what a user without a coordinator gets: one server, the whole model in few shards."""
    got, _, _ = trained(name, servers=1, exact=True)
    check_exact(name, "exact, 1", got, record_property)


@pytest.mark.parametrize("name", CASES)
def test_fused_is_within_a_few_ulp(name: str, record_property: Record) -> None:
    """By default servers run fused kernels, whose vector tails round differently: close, and no more than that."""
    size = small_shard_bytes(name)
    got, _, _ = trained(name, servers=3, exact=False, shard_bytes=size, message_bytes=4 * size)
    check_fused(name, "fused, 3", got, record_property)
