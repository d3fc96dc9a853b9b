"""Which buffers workers share, under which policy, and when they have changed."""

from __future__ import annotations

import logging
from typing import cast

import pytest
import torch
from torch import nn

from ps.errors import ConfigError, UnsupportedError
from tests.support.nets import Normed
from workers.model_buffers import ModelBuffers, Policies, describe_buffers

DEFAULT = {
    "mean": "average",
    "mask": "local",
    "seen": "local",
    "first.1.running_mean": "average",
    "first.1.running_var": "average",
    "first.1.num_batches_tracked": "max",
    "second.1.running_mean": "average",
    "second.1.running_var": "average",
    "second.1.num_batches_tracked": "max",
    "frozen.running_mean": "average",
    "frozen.running_var": "average",
    "frozen.num_batches_tracked": "max",
}


def compiled(model: nn.Module) -> nn.Module:
    return cast(nn.Module, torch.compile(model, backend="eager"))


def described(model: nn.Module, policies: Policies | None = None) -> dict[str, str]:
    return {buffer.spec.name: buffer.spec.buffer for buffer in describe_buffers(model, policies)}


def test_floats_are_averaged_counters_take_the_maximum_the_rest_is_local() -> None:
    """The default. Buffers that are not persistent, or None, are nobody's business."""
    assert described(Normed()) == DEFAULT
    assert list(described(Normed())) == [name for name in Normed().state_dict() if name in DEFAULT]


def test_a_policy_for_all_or_by_module() -> None:
    """The longest module name that fits counts; integers follow only to `local`."""
    latest = described(Normed(), "latest")
    assert (
        latest["mean"] == latest["first.1.running_var"] == "latest" and latest["first.1.num_batches_tracked"] == "max"
    )
    assert set(described(Normed(), "local").values()) == {"local"}
    mixed = described(Normed(), {"first": "local", "first.1": "latest", "second": "local"})
    assert mixed["first.1.running_mean"] == "latest" and mixed["first.1.num_batches_tracked"] == "max"
    assert mixed["second.1.running_mean"] == mixed["second.1.num_batches_tracked"] == "local"
    assert mixed["mean"] == mixed["frozen.running_mean"] == "average"


def test_names_are_those_of_the_plain_model_under_wrappers() -> None:
    """torch.compile and DataParallel add nothing."""
    model = Normed()
    assert described(compiled(model)) == described(nn.DataParallel(model)) == DEFAULT
    inner = nn.Sequential(compiled(nn.BatchNorm1d(2)))
    assert list(described(inner, {"0": "latest"})) == ["0.running_mean", "0.running_var", "0.num_batches_tracked"]


def test_bad_policies_are_refused_by_name() -> None:
    """What is there instead is said."""
    with pytest.raises(ConfigError, match="policy 'mean' must be one of: average, latest, local"):
        describe_buffers(Normed(), "mean")
    with pytest.raises(ConfigError, match="the model has no module 'third'"):
        describe_buffers(Normed(), {"third": "local"})


def test_buffers_that_servers_cannot_hold_are_named_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    """Expanded and sparse tensors, unusual dtypes."""
    model = nn.Linear(1, 1)
    model.register_buffer("wide", torch.zeros(1).expand(9))
    model.register_buffer("rows", torch.eye(2).to_sparse())
    model.register_buffer("small", torch.zeros(2, dtype=torch.float8_e5m2))
    with caplog.at_level(logging.WARNING):
        assert described(model) == {}
    assert [record.args[0] for record in caplog.records] == ["wide", "rows", "small"]  # type: ignore[index]


def test_changes_are_noticed_in_place_by_replacement_and_by_batch_norm() -> None:
    """Kernels of normalisations don't tell the version counter; a layer in training mode that was not used counts as
    unchanged."""
    model = Normed()
    buffers = ModelBuffers(describe_buffers(model, None))
    names = list(DEFAULT)

    def changed() -> set[str]:
        return {name for name, flag in zip(names, buffers.changed(), strict=True) if flag}

    model.eval()
    buffers.remember()
    model(torch.randn(4, 7))
    assert changed() == set()
    model.mean.add_(1)
    assert changed() == {"mean"}
    buffers.remember()
    model.train()
    model(torch.randn(4, 7))  # `frozen` is put into evaluation mode there
    assert changed() == {name for name in names if DEFAULT[name] != "local" and not name.startswith("frozen")}
    buffers.remember()
    assert changed() == set()
    with torch.no_grad():
        model(torch.randn(4, 7))
    assert "first.1.running_var" in changed()


def test_instance_norm_counts_no_batches_so_its_values_are_compared() -> None:
    """Its counter stays at 0."""
    model = nn.InstanceNorm1d(3, track_running_stats=True)
    buffers = ModelBuffers(describe_buffers(model, None))
    buffers.remember()
    assert buffers.changed() == [False] * 3
    model(torch.randn(2, 3, 5))
    assert buffers.changed() == [True, True, False]


def test_a_shared_buffer_of_another_form_is_refused_and_a_local_one_is_left_alone() -> None:
    """By name, with what to do."""
    model = Normed()
    buffers = ModelBuffers(describe_buffers(model, None))
    model.mask = torch.zeros(3, dtype=torch.bool)
    assert buffers.tensors()[1].shape == (9,)
    model.mean = torch.zeros(4)
    with pytest.raises(UnsupportedError, match=r"'mean' was float64 \[9\] at attach\(\) and is float32 \[4\] now"):
        buffers.tensors()
