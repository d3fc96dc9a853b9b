"""Any model, any shard size: every element in exactly one piece, aligned, nothing overlapping, plan reproducible."""

from __future__ import annotations

from math import prod

from hypothesis import given, settings
from hypothesis import strategies as st

from ps.sharding.assign import place
from ps.sharding.partition import make_plan
from ps.sharding.spec import ALIGN_BYTES, DTYPE_BYTES, NO_GROUP, ModelSignature, ParamSpec, Shard, ShardingPlan
from ps.types import Incarnation

small_shapes = st.one_of(st.just(()), st.tuples(st.integers(0, 5), st.integers(0, 40)), st.tuples(st.integers(0, 3000)))
any_shapes = st.one_of(small_shapes, st.tuples(st.integers(0, 2**33)))
sizes = st.sampled_from([0, 1, 64, 100, 4096, 1 << 20])


@st.composite
def signatures(draw: st.DrawFn, shapes: st.SearchStrategy[tuple[int, ...]] = any_shapes) -> ModelSignature:
    params = [
        ParamSpec(
            name=f"p{index}",
            shape=shape,
            dtype=draw(st.sampled_from(sorted(DTYPE_BYTES))),
            group=draw(st.integers(NO_GROUP, 2)),
            sparse=bool(shape) and draw(st.booleans()),
        )
        for index, shape in enumerate(draw(st.lists(shapes, max_size=12)))
    ]
    return ModelSignature(params=tuple(params), optimizer="SGD", whole_tensors=draw(st.booleans()))


def check_shards(plan: ShardingPlan) -> None:
    for index, shard in enumerate(plan.shards):
        item = DTYPE_BYTES[shard.dtype]
        assert shard.id == index
        assert shard.pieces
        assert shard.nbytes % ALIGN_BYTES == 0
        ends = 0
        for piece in shard.pieces:
            assert piece.offset >= ends
            assert piece.offset * item % ALIGN_BYTES == 0
            assert shard.row_elems or piece.begin * item % ALIGN_BYTES == 0
            assert plan.signature.params[piece.param].dtype == shard.dtype
            assert plan.signature.params[piece.param].group == shard.group
            ends = piece.offset + piece.numel
        assert ends <= shard.numel < ends + ALIGN_BYTES
        check_shapes(plan, shard)


def check_shapes(plan: ShardingPlan, shard: Shard) -> None:
    """Sparse shards hold whole rows of one parameter; shapes are there exactly where they matter, and fit."""
    sparse = [plan.signature.params[piece.param].sparse for piece in shard.pieces]
    assert len(shard.rows) == 0 or sparse == [True]
    for piece, rows in zip(shard.pieces, sparse, strict=True):
        param = plan.signature.params[piece.param]
        if rows:
            assert shard.row_elems == param.row_elems
            assert piece.shape == (len(shard.rows), *param.shape[1:])
            assert piece.begin == shard.rows.start * param.row_elems
        assert (piece.shape is not None) == (rows or plan.signature.whole_tensors)
        assert piece.shape is None or prod(piece.shape) == piece.numel


def check_cover(plan: ShardingPlan) -> None:
    covered: dict[int, list[tuple[int, int]]] = {}
    for shard in plan.shards:
        for piece in shard.pieces:
            covered.setdefault(piece.param, []).append((piece.begin, piece.end))
    for index, param in enumerate(plan.signature.params):
        spans = sorted(covered.get(index, []))
        assert [begin for begin, _ in spans] == [0, *(end for _, end in spans[:-1])][: len(spans)]
        assert (spans[-1][1] if spans else 0) == param.numel
        if plan.signature.whole_tensors:
            assert len(spans) <= 1


@settings(max_examples=150, deadline=None)
@given(signatures(), sizes)
def test_every_element_lies_in_exactly_one_piece(signature: ModelSignature, shard_bytes: int) -> None:
    """Cover, alignment, order, kinds and whole tensors hold for any model; the plan is a function of its inputs."""
    if sum(param.numel for param in signature.params) > 10**6:
        shard_bytes = 0  # millions of small shards would only take long
    plan = make_plan(signature, shard_bytes)
    check_shards(plan)
    check_cover(plan)
    assert make_plan(signature, plan.shard_bytes) == plan


@settings(max_examples=60, deadline=None)
@given(
    signatures(small_shapes),
    st.lists(st.sets(st.integers(1, 9), min_size=1, max_size=6), min_size=1, max_size=5),
)
def test_placement_uses_live_servers_only_and_settles(signature: ModelSignature, history: list[set[int]]) -> None:
    """Through any history of servers each shard has one live holder, and asking again moves nothing."""
    plan = make_plan(signature, 4096)
    placement: tuple[Incarnation, ...] | None = None
    for live in history:
        servers = [Incarnation(number) for number in live]
        placement = place(plan, servers, placement)
        assert len(placement) == len(plan.shards)
        assert set(placement) <= set(servers)
        assert place(plan, servers, placement) == placement
