"""The plan of a model: cuts, packing, balance, 64-bit sizes, refusals."""

from __future__ import annotations

from itertools import pairwise

import pytest

from ps.errors import ConfigError, UnsupportedError
from ps.sharding.assign import bytes_per_server, place
from ps.sharding.layout import offsets, rows_bytes
from ps.sharding.partition import LARGEST_SHARD_BYTES, LEVEL, MAX_SHARD_BYTES, MOST_SERVERS, make_plan
from ps.sharding.spec import ALIGN_BYTES, DTYPE_BYTES, NO_GROUP, ModelSignature, ParamSpec, ShardingPlan
from ps.types import Incarnation


def signature(*shapes: tuple[int, ...], dtype: str = "float32", whole: bool = False) -> ModelSignature:
    params = tuple(ParamSpec(name=f"p{i}", shape=shape, dtype=dtype, group=0) for i, shape in enumerate(shapes))
    return ModelSignature(params=params, optimizer="SGD", whole_tensors=whole)


def vgg16() -> ModelSignature:
    widths = [3, 64, 64, 128, 128, 256, 256, 256, 512, 512, 512, 512, 512, 512]
    shapes: list[tuple[int, ...]] = []
    for narrow, wide in pairwise(widths):
        shapes += [(wide, narrow, 3, 3), (wide,)]
    shapes += [(4096, 25088), (4096,), (4096, 4096), (4096,), (1000, 4096), (1000,)]
    return signature(*shapes)


def bert() -> ModelSignature:
    width = 768
    shapes: list[tuple[int, ...]] = [(30522, width), (512, width), (2, width), (width,), (width,)]
    for _ in range(12):
        shapes += [(width, width), (width,)] * 4
        shapes += [(width,), (width,), (4 * width, width), (4 * width,), (width, 4 * width), (width,), (width,)]
    params = [
        ParamSpec(name=f"p{i}", shape=shape, dtype="float32", group=int(len(shape) == 1))
        for i, shape in enumerate(shapes)
    ]
    return ModelSignature(params=tuple(params), optimizer="AdamW")


MODELS = {
    "vgg16": vgg16(),
    "bert": bert(),
    "one huge embedding": signature((10_000_000, 64)),
    "1000 tiny": signature(*[(64,)] * 1000),
    "1000 small": signature(*[(1024,)] * 1000),
    "digits": signature((32, 1, 3, 3), (32,), (64, 32, 3, 3), (64,), (10, 1024), (10,)),
}


def worst_imbalance(plan: ShardingPlan) -> float:
    worst = 1.0
    for count in range(1, MOST_SERVERS + 1):
        servers = [Incarnation(number) for number in range(1, count + 1)]
        loads = bytes_per_server(plan, place(plan, servers))
        worst = max(worst, max(loads.values()) * count / plan.nbytes)
    return worst


@pytest.mark.parametrize("name", MODELS)
def test_placement_is_level_on_one_to_eight_servers(name: str) -> None:
    """Big, small, lopsided and crumbly models all balance to 5% without anything to set."""
    assert worst_imbalance(make_plan(MODELS[name])) <= LEVEL


@pytest.mark.parametrize("name", MODELS)
def test_chosen_shards_fit_a_message(name: str) -> None:
    """No chosen shard exceeds one message, so none comes near 32 MiB."""
    assert max(shard.nbytes for shard in make_plan(MODELS[name]).shards) <= LARGEST_SHARD_BYTES


def test_small_models_get_few_shards() -> None:
    """A model below 3 MiB is cut in 14 unequal shards instead of 48 equal ones: calls cost more than bytes."""
    assert len(make_plan(MODELS["1000 tiny"]).shards) == 14


def test_sizes_beyond_31_bits() -> None:
    """2**31 + 3 elements: sizes and offsets don't wrap, nothing is lost."""
    plan = make_plan(signature((2**31 + 3,)))
    assert sum(piece.numel for shard in plan.shards for piece in shard.pieces) == 2**31 + 3
    assert plan.shards[-1].pieces[-1].end == 2**31 + 3


def test_explicit_size_splits_at_multiples_of_64_bytes() -> None:
    """1000 floats in shards of 1 KiB: four shards, each starting where the last one ended."""
    plan = make_plan(signature((10, 100)), shard_bytes=1024)
    assert [(p.begin, p.end) for shard in plan.shards for p in shard.pieces] == [
        (0, 256),
        (256, 512),
        (512, 768),
        (768, 1000),
    ]
    assert all(shard.nbytes % ALIGN_BYTES == 0 for shard in plan.shards)


def test_small_tensors_are_packed_aligned() -> None:
    """Three tensors of 1, 17 and 2 floats share a shard, each at a multiple of 64 bytes."""
    (shard,) = make_plan(signature((), (17,), (2,)), shard_bytes=1024).shards
    assert [(p.param, p.offset, p.numel) for p in shard.pieces] == [(0, 0, 1), (1, 16, 17), (2, 48, 2)]
    assert shard.numel == 64


def test_groups_and_dtypes_never_share_a_shard() -> None:
    """Interleaved groups, dtypes and frozen parameters: each shard holds one kind."""
    kinds = [("float32", 0), ("float64", 0), ("float32", 1), ("float32", NO_GROUP), ("float32", 0)]
    params = tuple(ParamSpec(name=f"p{i}", shape=(5,), dtype=d, group=g) for i, (d, g) in enumerate(kinds))
    plan = make_plan(ModelSignature(params=params, optimizer="SGD"))
    for shard in plan.shards:
        assert {kinds[piece.param] for piece in shard.pieces} == {(shard.dtype, shard.group)}
    assert sorted({p.param for s in plan.shards for p in s.pieces}) == [0, 1, 2, 3, 4]


def test_streams_are_cut_end_to_end() -> None:
    """Two groups of 1.5 KiB in shards of 1 KiB: the second is cut at 2 KiB of both, so its first shard is short."""
    params = tuple(ParamSpec(name=f"p{i}", shape=(384,), dtype="float32", group=i) for i in range(2))
    plan = make_plan(ModelSignature(params=params, optimizer="SGD"), shard_bytes=1024)
    assert [(shard.group, shard.nbytes) for shard in plan.shards] == [(0, 1024), (0, 512), (1, 512), (1, 1024)]


def test_empty_parameters_take_no_room() -> None:
    """A parameter without elements has no piece; a model of nothing else has no shard."""
    plan = make_plan(signature((0, 3), (4,)), shard_bytes=64)
    assert [piece.param for shard in plan.shards for piece in shard.pieces] == [1]
    assert make_plan(signature((0,))).shards == ()


def test_whole_tensors_are_never_split() -> None:
    """With `whole_tensors` a tensor larger than the shard size gets a shard of its own; small ones are packed."""
    plan = make_plan(signature((100,), (10_000,), (100,), (100,), whole=True), shard_bytes=4096)
    assert [[(p.param, p.numel) for p in shard.pieces] for shard in plan.shards] == [
        [(0, 100)],
        [(1, 10_000)],
        [(2, 100), (3, 100)],
    ]


def test_whole_tensors_get_a_chosen_size_too() -> None:
    """A chosen size works when tensors can't be split, however lopsided they are."""
    plan = make_plan(signature((100,), (2_000_000,), (100,), whole=True))
    assert all(piece.begin == 0 for shard in plan.shards for piece in shard.pieces)


def table(*shapes: tuple[int, ...], dtype: str = "float32") -> ModelSignature:
    params = tuple(
        ParamSpec(name=f"p{i}", shape=shape, dtype=dtype, group=0, sparse=len(shape) > 1)
        for i, shape in enumerate(shapes)
    )
    return ModelSignature(params=params, optimizer="SGD")


def test_sparse_parameters_are_cut_between_rows() -> None:
    """Shards of a table hold whole rows of nothing else: rows of 12 bytes, cut at the first row end after 64 bytes."""
    plan = make_plan(table((3,), (14, 3), (2, 100)), shard_bytes=64)
    assert [(s.pieces[0].param, s.row_elems, list(s.rows)[:1], len(s.rows), s.nbytes) for s in plan.shards] == [
        (0, 0, [], 0, 64),
        (1, 3, [0], 6, 128),
        (1, 3, [6], 5, 64),
        (1, 3, [11], 3, 64),
        (2, 100, [0], 1, 448),
        (2, 100, [1], 1, 448),
    ]
    assert all(len(shard.pieces) == 1 for shard in plan.shards)


def test_optimizers_see_shapes_where_they_matter() -> None:
    """A table's rows, whole tensors; stretches that may be cut anywhere have none."""
    assert [s.pieces[0].shape for s in make_plan(table((3, 2, 2)), shard_bytes=64).shards] == [(3, 2, 2)]
    shapes = [piece.shape for shard in make_plan(signature((4, 4), (), whole=True)).shards for piece in shard.pieces]
    assert shapes == [(4, 4), ()]
    assert all(piece.shape is None for shard in make_plan(signature((4, 4))).shards for piece in shard.pieces)


@pytest.mark.parametrize("shape", [(10_000_000, 64), (3_000_000, 1), (50_000, 333)])
def test_tables_are_level(shape: tuple[int, int]) -> None:
    """Cuts at row ends leave the loads of 1 to 8 servers level."""
    plan = make_plan(table(shape, (100,)))
    assert worst_imbalance(plan) <= LEVEL
    assert max(shard.nbytes for shard in plan.shards) <= LARGEST_SHARD_BYTES + 4096


@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize("whole", [False, True])
def test_more_than_two_gib(sparse: bool, whole: bool) -> None:
    """Elements, bytes, rows and offsets beyond 32 bits stay exact, in plan, messages and rows."""
    rows = 2**31 + 3
    params = (ParamSpec(name="big", shape=(rows, 2), dtype="bfloat16", group=0, sparse=sparse),)
    plan = make_plan(ModelSignature(params=params, optimizer="SGD", whole_tensors=whole))
    last = plan.shards[-1]
    assert last.pieces[-1].end == 2 * rows
    assert sum(shard.pieces[0].numel for shard in plan.shards) == 2 * rows
    assert plan.nbytes >= 4 * rows > 2**33
    if sparse:
        assert last.rows.stop == rows
        assert rows_bytes(last, len(last.rows)) >= 12 * len(last.rows)
    assert offsets(plan, [shard.id for shard in plan.shards])[-1] == plan.nbytes - last.nbytes


def test_a_number_has_no_rows() -> None:
    """A sparse parameter without dimensions makes no sense, and is refused by name."""
    params = (ParamSpec(name="scale", shape=(), dtype="float32", group=0, sparse=True),)
    with pytest.raises(ConfigError, match="'scale' has no dimensions"):
        make_plan(ModelSignature(params=params, optimizer="SGD"))


def test_unknown_dtype_is_refused_by_name() -> None:
    """An int8 parameter is refused, naming it and what is served."""
    with pytest.raises(UnsupportedError, match="'p0' has dtype int8"):
        make_plan(signature((3,), dtype="int8"))


def test_bad_sizes_and_groups_are_refused() -> None:
    """A shard size past the message limit, a negative one, and a group below NO_GROUP."""
    for size in (MAX_SHARD_BYTES + 1, -1):
        with pytest.raises(ConfigError, match="shard size"):
            make_plan(signature((3,)), shard_bytes=size)
    params = (ParamSpec(name="p", shape=(3,), dtype="float32", group=-2),)
    with pytest.raises(ConfigError, match="group -2"):
        make_plan(ModelSignature(params=params, optimizer="SGD"))


def test_digest_tells_plans_apart() -> None:
    """Equal inputs give equal digests; a name, a shape, the optimizer or the size changes it."""
    base = make_plan(signature((4, 4)))
    assert make_plan(signature((4, 4))).digest == base.digest
    others = [
        make_plan(signature((16,))),
        make_plan(signature((4, 4)), shard_bytes=64),
        make_plan(signature((4, 4), dtype="float64")),
        make_plan(ModelSignature(params=signature((4, 4)).params, optimizer="Adam")),
    ]
    assert len({base.digest, *(plan.digest for plan in others)}) == 5


def test_digest_is_stable_across_releases() -> None:
    """The canonical form doesn't change by accident: checkpoints and recordings hold this digest."""
    assert make_plan(signature((4, 4), (3,)), shard_bytes=64).digest.startswith("a0b14381bdf35ed8")
    assert make_plan(table((4, 4), (3,)), shard_bytes=64).digest.startswith("4beba5db3c0d54d0")


@pytest.mark.parametrize("dtype", DTYPE_BYTES)
def test_every_dtype_is_cut_at_whole_elements(dtype: str) -> None:
    """No dtype is cut inside an element."""
    plan = make_plan(signature((77,), dtype=dtype), shard_bytes=64)
    assert sum(piece.numel for shard in plan.shards for piece in shard.pieces) == 77
