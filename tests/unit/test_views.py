"""What `psctl status` and `psctl plan` show."""

from __future__ import annotations

import json

import pytest
from torch.optim import Adagrad

from ps import planning, views
from ps.errors import ConfigError, UnsupportedError
from ps.v1 import coordinator_pb2 as pb
from ps.v1 import types_pb2
from tests.support.models import Words
from workers.signature import describe


def reply() -> pb.StatusReply:
    """The status of a small running job."""
    return pb.StatusReply(
        state=types_pb2.JOB_STATE_RUNNING,
        members=[
            pb.MemberStatus(
                role=types_pb2.ROLE_SERVER, name="server-0", incarnation=1, pid=12, host="a", address="uv://10.0.0.1:4",
                state=types_pb2.MEMBER_STATE_LIVE, heartbeat_age_s=0.25,
            )
        ],
        shards=[pb.ShardStatus(shard=0, bytes=4096, epoch=1, version=7, holder="server-0", dtype="float32")],
        progress=pb.Progress(samples=640, samples_per_s=100.0, epoch=1, staleness={0: 3, 2: 1}),
    )  # fmt: skip


def test_status_names() -> None:
    """The names that scripts rely on, with words for states and roles."""
    record = json.loads(json.dumps(views.status_record(reply())))
    assert record["job"] == "running"
    member = record["members"][0]
    assert {key: member[key] for key in ("role", "name", "incarnation", "pid", "host", "address", "state")} == {
        "role": "server", "name": "server-0", "incarnation": 1, "pid": 12, "host": "a", "address": "uv://10.0.0.1:4",
        "state": "live",
    }  # fmt: skip
    assert member["heartbeat_age_s"] == 0.25
    assert record["shards"][0]["id"] == 0 and record["shards"][0]["holder"] == "server-0"
    progress = record["progress"]
    assert progress["samples"] == 640 and progress["samples_per_s"] == 100.0 and progress["epoch"] == 1
    assert progress["staleness"] == {"mean": 0.5, "max": 2, "histogram": {"0": 3, "2": 1}}


def test_status_table(capsys: pytest.CaptureFixture[str]) -> None:
    """The table names each member and shard."""
    views.print_status(reply())
    shown = capsys.readouterr().out
    assert "job running" in shown and "server" in shown and "4.0 KiB" in shown


def test_a_narrow_terminal_cuts_no_address(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Addresses and names are there to be copied."""
    monkeypatch.setenv("COLUMNS", "60")
    views.print_status(reply())
    shown = capsys.readouterr().out
    assert "uv://10.0.0.1:4" in shown and "server-0" in shown and "…" not in shown


def test_sizes() -> None:
    """Powers of 1024."""
    assert [views.size(n) for n in (0, 1023, 1536, 5 << 20, 3 << 30)] == [
        "0 B", "1023 B", "1.5 KiB", "5.0 MiB", "3.0 GiB"
    ]  # fmt: skip


def test_plan_of_a_factory() -> None:
    """The bytes of all servers are the model's, padding included, and level."""
    layout = planning.layout(planning.signature("tests.support.models:Mlp", "AdamW"), 3, 0)
    record = views.plan_record(layout)
    assert sum(layout.server_bytes) == layout.plan.nbytes == record["bytes"]
    assert layout.imbalance <= 1.05


def test_plan_of_tables_is_the_one_that_workers_make() -> None:
    """`psctl plan` knows which gradients travel as rows, so that it shows the cuts that will be made."""
    shown = planning.signature("tests.support.models:Words", "Adagrad")
    model = Words()
    assert describe(model, Adagrad(model.parameters())).signature == shown
    with pytest.raises(UnsupportedError, match="AdamW does not support sparse gradients"):
        planning.signature("tests.support.models:Words", "AdamW")


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("torch.nn", "is not PACKAGE.MODULE:FACTORY"),
        ("no_such_module_at_all:f", "no module 'no_such_module_at_all'"),
        ("torch.nn:Nothing", "has no 'Nothing'"),
        ("builtins:dict", "not a torch.nn.Module"),
        ("ps:__doc__", "can't be called"),
    ],
)
def test_wrong_factories(model: str, message: str) -> None:
    """Each mistake in --model has an error of its own."""
    with pytest.raises(ConfigError, match=message):
        planning.signature(model, "AdamW")


def test_wrong_optimizer() -> None:
    """An optimizer that servers can't run is refused by name."""
    with pytest.raises(UnsupportedError, match="LBFGS"):
        planning.signature("torch.nn:Transformer", "LBFGS")
