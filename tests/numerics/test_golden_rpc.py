"""The golden test over real RPC: one process each for coordinator, servers and worker."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.numerics.cases import run
from tests.numerics.compare import Record, check_exact, check_fused
from tests.support import golden
from tests.support.cluster import ROOT, Local
from tests.support.nets import Normed
from tests.support.zygote import Zygote, train

OPTIMIZERS = ("sgd", "sgd_momentum_decay", "adam", "adamw", "adagrad", "rmsprop")

KINDS = ("sparse_adagrad_groups", "sparse_adam", "mixed_dtypes", "adafactor")
"""Gradients as rows, dtypes side by side, whole tensors: what payloads and records carry besides."""

SHARD_BYTES = 256
"""So small that most tensors are split, over all servers."""


@pytest.fixture(scope="module")
def zygote(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Zygote]:
    with Zygote(tmp_path_factory.mktemp("members")) as zygote:
        yield zygote


@pytest.mark.parametrize(
    ("name", "servers"),
    [*((name, servers) for name in OPTIMIZERS for servers in (1, 3)), *((name, 3) for name in KINDS)],
)
def test_exact_over_rpc_is_bitwise_plain_pytorch(
    name: str, servers: int, tmp_path: Path, zygote: Zygote, record_property: Record
) -> None:
    """50 steps, tensors split over shards and servers: the servers' weights equal plain PyTorch's in every bit."""
    path = train(tmp_path / "job", name, servers=servers, exact=True, shard_bytes=SHARD_BYTES, zygote=zygote)
    check_exact(name, f"RPC, {servers}", torch.load(path), record_property)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_fused_over_rpc_is_within_a_few_ulp(name: str, tmp_path: Path, zygote: Zygote, record_property: Record) -> None:
    """By default servers run fused kernels: close, and no more than that."""
    path = train(tmp_path / "job", name, servers=3, exact=False, shard_bytes=SHARD_BYTES, zygote=zygote)
    check_fused(name, "RPC fused, 3", torch.load(path), record_property)


@pytest.mark.parametrize("name", ["accumulate_5", "transformer_and_lstm"])
def test_a_tiny_queue_and_many_messages_change_nothing(
    name: str, tmp_path: Path, zygote: Zygote, record_property: Record
) -> None:
    """Servers that have room for one message at a time say busy over and over: later, but bitwise the same."""
    path = train(
        tmp_path / "job",
        name,
        servers=2,
        exact=True,
        shard_bytes=128,
        zygote=zygote,
        queue_bytes=128,
        message_bytes=128,
    )
    check_exact(name, "RPC, 2", torch.load(path), record_property)


def test_the_model_that_psctl_local_exports_is_bitwise_plain_pytorch(tmp_path: Path) -> None:
    """The same through the command and its file, which `load_state_dict` takes strictly: weights and shared buffers as
    plain PyTorch has them, local ones as they were at first."""
    env = {"PYTHONPATH": str(ROOT)}
    flags = ("--exact", f"--shard-bytes={SHARD_BYTES}")
    with Local(Path(golden.__file__), tmp_path, servers=2, flags=flags, arguments=["batchnorm"], env=env) as local:
        assert local.wait() == 0, local.out + local.err
    model, expected = Normed(), run("batchnorm").state_dict()
    model.load_state_dict(load_file(local.run_dir / "model.safetensors"), strict=True)
    assert [name for name, value in model.state_dict().items() if not torch.equal(value, expected[name])] == ["seen"]
    assert int(model.seen) == 0 and int(model.state_dict()["first.1.num_batches_tracked"]) == 20
