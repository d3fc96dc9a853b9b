"""Gradients that travel as rows: applied as torch applies them, and refused whole when they can't be right."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from ps.optim.spec import hyper, served
from ps.rpc.wire import Caller, Push, ShardPush, Status
from ps.server.host import Host
from ps.sharding.layout import payload_bytes, rows_bytes, values_offset
from ps.sharding.partition import make_plan
from ps.sharding.spec import ModelSignature, ParamSpec
from ps.types import DENSE, Incarnation, ShardId, Version
from tests.support.shards import SECRET, SERVER, Client, admitted, shard_map

WORKER = 10

TABLE = ModelSignature(
    params=(
        ParamSpec(name="table", shape=(10, 3), dtype="float32", group=0, sparse=True),
        ParamSpec(name="bias", shape=(4,), dtype="float32", group=0),
    ),
    optimizer="SGD",
)
"""With shards of 64 bytes: rows 0 to 5, rows 6 to 9, and the bias."""


class Rows:
    """A host with `TABLE`, all weights 0, and a worker that pushes rows."""

    def __init__(self) -> None:
        self.host = Host(exact=True)
        self.host.install_members(admitted(WORKER))
        before = shard_map(TABLE, shard_bytes=64)
        self.host.install_map(before, SERVER)
        assert Client(self.host, before, WORKER).init(0.0).statuses
        after = shard_map(TABLE, shard_bytes=64, epoch=2, initialised_by=WORKER)
        self.host.install_map(after, SERVER)
        self.client = Client(self.host, after, WORKER)
        self.plan = self.client.plan

    def part(self, shard: int, rows: int, *, present: bool = True) -> ShardPush:
        return ShardPush(shard=ShardId(shard), shard_epoch=1, base=Version(1, 0), present=bytes([present]), rows=rows)

    def region(self, shard: int, ids: list[int], value: float = 1.0) -> Tensor:
        spec = self.plan.shards[shard]
        region = torch.zeros(rows_bytes(spec, len(ids)), dtype=torch.uint8)
        region[: 8 * len(ids)].view(torch.int64).copy_(torch.tensor(ids, dtype=torch.int64))
        region[values_offset(len(ids)) :].view(torch.float32)[: 3 * len(ids)] = value
        return region

    def push(self, *parts: ShardPush, sequence: int = 0) -> Push:
        return Push(
            caller=Caller(incarnation=Incarnation(WORKER), secret=SECRET, map_epoch=2),
            sequence=sequence,
            samples=1,
            groups=self.client.groups,
            shards=parts,
        )

    def weights(self) -> Tensor:
        payload = self.client.pull([0, 1]).payload
        first, second = (self.plan.shards[index] for index in (0, 1))
        ends = (first.nbytes, first.nbytes + second.nbytes)
        halves = payload[: ends[0]].view(torch.float32)[:18], payload[ends[0] : ends[1]].view(torch.float32)[:12]
        return torch.cat(halves).view(10, 3)

    def check_untouched(self) -> None:
        assert not self.weights().any()
        assert [row.next_sequence for row in self.client.hello([0, 1, 2]).reply.shards] == [0] * 3


def test_rows_are_applied_where_they_belong() -> None:
    """Rows of two shards in one message, one of them without any: exactly those rows move, and each shard ticks."""
    rows = Rows()
    assert [list(shard.rows) for shard in rows.plan.shards] == [[0, 1, 2, 3, 4, 5], [6, 7, 8, 9], []]
    request = rows.push(rows.part(0, 2), rows.part(1, 1))
    answer = rows.client.submit(request, torch.cat([rows.region(0, [0, 4]), rows.region(1, [9], value=2.0)]))
    assert answer.statuses == [Status.OK] * 2
    expected = torch.zeros(10, 3)
    expected[[0, 4]], expected[9] = -1.0, -2.0
    assert torch.equal(rows.weights(), expected)
    again = rows.push(rows.part(0, 0), rows.part(1, 4), sequence=1)
    assert rows.client.submit(again, rows.region(1, [6, 7, 8, 9])).statuses == [Status.OK] * 2
    expected[6:] -= 1.0
    assert torch.equal(rows.weights(), expected)
    assert answer.payload.numel() == payload_bytes(rows.plan, [ShardId(0), ShardId(1)])


def test_no_rows_at_all_still_count_as_a_push() -> None:
    """A gradient that touches no row travels without payload, and is one version like any other."""
    rows = Rows()
    for sequence, present in enumerate([True, False]):
        request = rows.push(rows.part(0, 0, present=present), rows.part(1, 0, present=present), sequence=sequence)
        assert rows.client.submit(request).statuses == [Status.OK] * 2
    assert [row.version for row in rows.client.hello([0, 1]).reply.shards] == [Version(1, 2)] * 2


def test_rows_beside_dense_shards() -> None:
    """Both kinds in one message, in any order."""
    rows = Rows()
    bias = torch.ones(16).view(torch.uint8)
    request = rows.push(rows.part(2, DENSE), rows.part(1, 1))
    assert rows.client.submit(request, torch.cat([bias, rows.region(1, [7])])).statuses == [Status.OK] * 2
    assert rows.weights()[7].tolist() == [-1.0] * 3


@pytest.mark.parametrize(
    ("ids", "reason"),
    [
        ([6, 7], "shard 0: row ids go from 6 to 7, the shard holds rows 0 to 5"),
        ([5, 6], "shard 0: row ids go from 5 to 6, the shard holds rows 0 to 5"),
        ([4, 1 << 40], "shard 0: row ids go from 4 to 1099511627776, the shard holds rows 0 to 5"),
        ([-1, 2], "shard 0: row ids go from -1 to 2, the shard holds rows 0 to 5"),
        ([2, 2], "shard 0: row ids are not in ascending order, or one is there twice"),
        ([3, 2], "shard 0: row ids are not in ascending order"),
    ],
)
def test_ids_that_cannot_be_right(ids: list[int], reason: str) -> None:
    """Ids outside the shard, negative, twice or unsorted: refused by shard, and the good shard is not applied."""
    rows = Rows()
    request = rows.push(rows.part(1, 1), rows.part(0, len(ids)))
    answer = rows.client.submit(request, torch.cat([rows.region(1, [6]), rows.region(0, ids)]))
    assert reason in answer.reply.refused
    rows.check_untouched()


@pytest.mark.parametrize(
    ("part", "reason"),
    [
        ({"rows": DENSE}, "shard 0: the push has -1 rows of it, expected 0 to 6"),
        ({"rows": 7}, "shard 0: the push has 7 rows of it, expected 0 to 6"),
        ({"present": b"\x00"}, "shard 0: the push has 2 rows of it, expected 0 to 0"),
        ({"shard": ShardId(2)}, "shard 2: its gradients are dense, the push has 2 rows of it"),
        ({"rows": 6}, "payload has 128 bytes, its 1 shards take 192"),
        ({"rows": 0}, "payload has 128 bytes, its 1 shards take 0"),
    ],
)
def test_numbers_of_rows_that_do_not_fit(part: dict[str, object], reason: str) -> None:
    """Dense instead of rows and the other way round, more than there are, some without gradient, wrong payload."""
    rows = Rows()
    request = rows.push(replace(rows.part(0, 2), **part))  # type: ignore[arg-type]
    assert reason in rows.client.submit(request, rows.region(0, [0, 1])).reply.refused
    rows.check_untouched()


def test_rows_with_inf_or_nan_are_refused_by_name() -> None:
    """The values are looked at, and nothing behind them."""
    rows = Rows()
    region = rows.region(0, [0, 1], value=float("inf"))
    assert "the gradient of table" in rows.client.submit(rows.push(rows.part(0, 2)), region).reply.refused
    rows.check_untouched()


def test_a_push_held_back_keeps_its_rows() -> None:
    """Rows of a push that overtook an earlier one are applied after it: momentum shows the order."""
    rows = Rows()
    momentum = torch.optim.SGD([torch.zeros(1)], lr=1.0, momentum=0.5).param_groups[0]
    groups = (hyper(momentum, served("SGD")),)
    late = rows.client.submit(replace(rows.push(rows.part(0, 1), sequence=1), groups=groups), rows.region(0, [1]))
    assert late.waiting
    first = replace(rows.push(rows.part(0, 1), sequence=0), groups=groups)
    assert rows.client.submit(first, rows.region(0, [0])).statuses == [Status.OK]
    assert late.statuses == [Status.OK]
    assert rows.weights()[:3, 0].tolist() == [-1.5, -1.0, 0.0]


def test_plans_of_tables_are_stable() -> None:
    """Plans with sparse parameters have digests of a form of their own; those without keep theirs."""
    plan = make_plan(TABLE, 64)
    dense = replace(TABLE, params=tuple(replace(param, sparse=False) for param in TABLE.params))
    assert plan.digest != make_plan(dense, 64).digest
    assert plan.digest == make_plan(TABLE, 64).digest
