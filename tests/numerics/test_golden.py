"""One worker, asp: the weights on the servers equal those of plain PyTorch, bit for bit under exact kernels."""

from __future__ import annotations

from functools import cache

import pytest
import torch
from torch import Tensor

from ps.alone import LocalJob, settings
from ps.sharding.spec import ShardingPlan
from tests.numerics.cases import CASES, run
from tests.support.oracle import STEPS, weights
from workers import Worker
from workers.config import WorkerConfig
from workers.signature import named_params

SMALL_SHARD_BYTES = 128
"""So small that most tensors are split, over all servers."""


FEW_ULP = {
    torch.float32: 1e-6,
    torch.float64: 1e-14,
    torch.float16: 2e-3,
    torch.bfloat16: 1e-2,
    torch.complex64: 1e-6,
    torch.complex128: 1e-14,
    torch.int64: 0.0,
    torch.bool: 0.0,
}
"""Bounds, relative and absolute, for kernels whose vector tails round differently."""


@cache
def expected(name: str) -> dict[str, Tensor]:
    """What plain PyTorch makes of the case."""
    return weights(run(name))


def plan_of(job: LocalJob) -> ShardingPlan:
    """The plan of the job's model."""
    plan = job.state.model.plan
    assert plan is not None
    return plan


def trained(name: str, *, servers: int, exact: bool, shard_bytes: int) -> tuple[dict[str, Tensor], LocalJob]:
    """What torch-ps makes of it, as it lies on the servers at the end."""
    job = LocalJob(servers=servers, settings=settings(exact=exact, shard_bytes=shard_bytes))
    config = WorkerConfig(message_bytes=3 * SMALL_SHARD_BYTES)
    with Worker(job.member(), config) as worker:
        model = run(name, worker.attach)
        with torch.no_grad():
            params = dict(named_params(model))
            for spec in plan_of(job).signature.params:
                if spec.group >= 0:
                    params[spec.name].zero_()  # whatever is there afterwards came from the servers
        worker.pull()
        return {**weights(model), "pushes": torch.tensor(worker.global_step)}, job


def check_close(got: dict[str, Tensor], name: str) -> None:
    """Within a few ulp of the coarsest dtype in the model, or the case's own bound."""
    bound = max(CASES[name].bound, *(FEW_ULP[value.dtype] for value in got.values()))
    for key, value in got.items():
        torch.testing.assert_close(value, expected(name)[key], rtol=bound, atol=bound)


@pytest.mark.parametrize("servers", [1, 3])
@pytest.mark.parametrize("name", CASES)
def test_exact_is_bitwise_plain_pytorch(name: str, servers: int) -> None:
    """50 steps, tensors split over shards, messages and servers: not one bit differs under exact kernels."""
    got, job = trained(name, servers=servers, exact=True, shard_bytes=SMALL_SHARD_BYTES)
    pushes = got.pop("pushes")
    assert 0 < pushes <= STEPS
    assert got.keys() == expected(name).keys()
    if CASES[name].bound:
        check_close(got, name)
    else:
        assert [key for key, value in got.items() if not torch.equal(value, expected(name)[key])] == []
    pieces = [piece.param for shard in plan_of(job).shards for piece in shard.pieces]
    assert (len(pieces) > len(set(pieces))) == CASES[name].splits
    shard_map = job.state.model.shard_map
    assert shard_map is not None and len({holder.incarnation for holder in shard_map.holders}) == servers


@pytest.mark.parametrize("name", CASES)
def test_fused_is_within_a_few_ulp(name: str) -> None:
    """By default servers run fused kernels, whose vector tails round differently: close, and no more than that."""
    got, _ = trained(name, servers=3, exact=False, shard_bytes=SMALL_SHARD_BYTES)
    got.pop("pushes")
    check_close(got, name)


def test_alone_with_default_settings_is_plain_pytorch() -> None:
    """What a user without a coordinator gets: default shard sizes, exact kernels, no difference."""
    with Worker(LocalJob().member(), WorkerConfig()) as worker:
        got = weights(run("adamw", worker.attach))
    assert all(torch.equal(value, expected("adamw")[key]) for key, value in got.items())
