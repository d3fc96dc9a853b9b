"""The golden test over real RPC: one process each for coordinator, servers and worker."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.numerics.cases import run
from tests.support import golden
from tests.support.cluster import ROOT, Local
from tests.support.oracle import weights
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
def test_exact_over_rpc_is_bitwise_plain_pytorch(name: str, servers: int, tmp_path: Path, zygote: Zygote) -> None:
    """50 steps, tensors split over shards and servers: the servers' weights equal plain PyTorch's in every bit."""
    path = train(tmp_path / "job", name, servers=servers, exact=True, shard_bytes=SHARD_BYTES, zygote=zygote)
    got, expected = torch.load(path), weights(run(name))
    assert got.keys() == expected.keys()
    assert [key for key in got if not torch.equal(got[key], expected[key])] == []


@pytest.mark.parametrize("servers", [1, 3])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_fused_over_rpc_is_within_a_few_ulp(name: str, servers: int, tmp_path: Path, zygote: Zygote) -> None:
    """By default servers run fused kernels: close, and no more than that."""
    path = train(tmp_path / "job", name, servers=servers, exact=False, shard_bytes=SHARD_BYTES, zygote=zygote)
    got = torch.load(path)
    for key, value in weights(run(name)).items():
        torch.testing.assert_close(got[key], value, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("name", ["accumulate_5", "transformer_and_lstm"])
def test_a_tiny_queue_and_many_messages_change_nothing(name: str, tmp_path: Path, zygote: Zygote) -> None:
    """Servers that have room for one message at a time say busy over and over: later, but bitwise the same."""
    path = train(
        tmp_path / "job", name, servers=2, exact=True, shard_bytes=64, zygote=zygote, queue_bytes=64, message_bytes=64
    )
    got, expected = torch.load(path), weights(run(name))
    assert [key for key in expected if not torch.equal(got[key], expected[key])] == []


def test_the_model_that_psctl_local_exports_is_bitwise_plain_pytorch(tmp_path: Path) -> None:
    """The same through the command and the exported file, which `load_state_dict` takes."""
    env = {"PYTHONPATH": str(ROOT)}
    flags = ("--exact", f"--shard-bytes={SHARD_BYTES}")
    with Local(Path(golden.__file__), tmp_path, servers=2, flags=flags, arguments=["adamw"], env=env) as local:
        assert local.wait() == 0, local.out + local.err
    expected = weights(run("adamw"))
    got = load_file(local.run_dir / "model.safetensors")
    assert got.keys() == expected.keys()
    assert all(torch.equal(got[key], expected[key]) for key in got)
