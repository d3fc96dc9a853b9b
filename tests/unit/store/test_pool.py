"""SnapshotPool: buffers are shared by version, held by aliases, bounded, and come back."""

from __future__ import annotations

import torch

from ps.store.pool import Form, Snapshot, SnapshotPool
from ps.types import ShardId, Version

V1, V2 = Version(1, 1), Version(1, 2)


def form(*shards: int) -> Form:
    ids = tuple(ShardId(shard) for shard in shards)
    return Form(ids, (64,) * len(ids), (torch.float32,) * len(ids), torch.device("cpu"))


def taken(pool: SnapshotPool, wanted: Form) -> Snapshot:
    snapshot = pool.take(wanted)
    assert snapshot is not None
    return snapshot


def test_regions_are_views_of_one_payload() -> None:
    """Shards lie end to end in a buffer that owns exactly its storage, zeroed at first."""
    snapshot = taken(SnapshotPool(1), form(0, 1))
    snapshot.regions[1].fill_(1.0)
    assert snapshot.buffer.untyped_storage().nbytes() == snapshot.buffer.numel() == 128
    assert snapshot.buffer.view(torch.float32).tolist() == [0.0] * 16 + [1.0] * 16


def test_a_buffer_is_free_when_all_aliases_are_gone() -> None:
    """With one buffer, nobody else gets it until the last of two replies has let go."""
    pool = SnapshotPool(1)
    first, second = pool.share(taken(pool, form(0)), 2)
    assert pool.take(form(0)) is None
    del first
    assert pool.take(form(0)) is None
    del second
    assert pool.busy() == 0
    assert pool.take(form(0)) is not None
    pool.validate()


def test_each_reply_has_an_alias_of_its_own() -> None:
    """Two aliases are different objects over the same memory: returning one object would hide who still sends it."""
    pool = SnapshotPool(1)
    first, second = pool.share(taken(pool, form(0)), 2)
    assert first is not second
    assert first.data_ptr() == second.data_ptr()


def test_equal_versions_share_a_buffer() -> None:
    """`find` gives the buffer with exactly the versions asked for, also after its first reply is over."""
    pool = SnapshotPool(2)
    snapshot = taken(pool, form(0))
    assert pool.find(form(0).layout, (V1,)) is None
    pool.publish(snapshot, (V1,))
    pool.release(snapshot)
    assert pool.find(form(0).layout, (V1,)) is snapshot
    assert pool.find(form(0).layout, (V2,)) is None
    assert pool.find(form(1).layout, (V1,)) is None


def test_a_buffer_being_rewritten_is_not_found() -> None:
    """Once taken for new weights, the old versions are no longer offered."""
    pool = SnapshotPool(1)
    snapshot = taken(pool, form(0))
    pool.publish(snapshot, (V1,))
    pool.release(snapshot)
    taken(pool, form(0))
    assert pool.find(form(0).layout, (V1,)) is None


def test_the_stalest_free_buffer_is_reused() -> None:
    """The newest snapshot stays findable for as long as another one is free."""
    pool = SnapshotPool(2)
    old, new = taken(pool, form(0)), taken(pool, form(0))
    for snapshot, version in ((old, V1), (new, V2)):
        pool.publish(snapshot, (version,))
        pool.release(snapshot)
    assert taken(pool, form(0)) is old
    assert pool.find(form(0).layout, (V2,)) is new


def test_idle_layouts_are_dropped_first() -> None:
    """Memory is bounded: the least recently used layout without replies under way goes; a busy one stays."""
    pool = SnapshotPool(1, max_layouts=2)
    alias = pool.share(taken(pool, form(0)), 1)
    pool.release(taken(pool, form(1)))
    pool.release(taken(pool, form(2)))
    pool.validate()
    assert pool.take(form(0)) is None
    assert alias[0].numel() == 64
