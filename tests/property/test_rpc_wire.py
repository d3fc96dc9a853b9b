"""Records on the wire: exact round trips, and nothing but `WireError` for whatever else arrives."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ps.errors import WireError
from ps.rpc.wire import (
    MAX_INT,
    Caller,
    Hello,
    Init,
    Load,
    Pull,
    Push,
    ReadState,
    Reply,
    Request,
    ShardPush,
    ShardReply,
    Status,
    WriteState,
    from_wire,
    plain,
    reply_from_wire,
    reply_to_wire,
    to_wire,
)
from ps.types import DENSE, MAX_INCARNATION, Incarnation, ShardId, Version

naturals = st.integers(0, MAX_INT)
shard_ids = naturals.map(ShardId)
versions = st.builds(Version, naturals, naturals)
floats = st.floats(allow_nan=False)
hyper_values = (
    st.none()
    | st.booleans()
    | floats
    | st.integers(-MAX_INT, MAX_INT)
    | st.text(max_size=9)
    | st.tuples(floats, floats)
    | st.tuples(st.none(), floats)
)
hypers = st.lists(st.tuples(st.text(max_size=9), hyper_values), max_size=4).map(tuple)
callers = st.builds(
    Caller,
    incarnation=st.integers(1, MAX_INCARNATION).map(Incarnation),
    secret=st.binary(min_size=16, max_size=16),
    map_epoch=naturals,
)
shard_pushes = st.builds(
    ShardPush,
    shard=shard_ids,
    shard_epoch=naturals,
    base=versions,
    present=st.binary(max_size=9),
    rows=st.just(DENSE) | naturals,
)
pairs = st.lists(st.tuples(shard_ids, naturals), max_size=4).map(tuple)
bases = st.lists(st.tuples(shard_ids, naturals, st.none() | versions), max_size=4).map(tuple)
requests: st.SearchStrategy[Request] = st.one_of(
    st.builds(Hello, caller=callers, shards=pairs),
    st.builds(Init, caller=callers, shards=pairs),
    st.builds(Load, caller=callers, shards=pairs),
    st.builds(ReadState, caller=callers, shards=pairs),
    st.builds(WriteState, caller=callers, shards=pairs),
    st.builds(Pull, caller=callers, shards=bases),
    st.builds(
        Push,
        caller=callers,
        sequence=naturals,
        samples=naturals,
        groups=st.lists(hypers, max_size=2).map(tuple),
        shards=st.lists(shard_pushes, max_size=4).map(tuple),
        poll=st.booleans(),
    ),
)
shard_replies = st.builds(
    ShardReply, shard=shard_ids, status=st.sampled_from(Status), version=versions, next_sequence=naturals
)
replies = st.builds(
    Reply,
    shards=st.lists(shard_replies, max_size=4).map(tuple),
    refused=st.text(max_size=30).map(plain),
    fenced=st.booleans(),
)
leaves = st.none() | st.booleans() | st.integers() | st.floats() | st.binary(max_size=20) | st.text(max_size=5)
junk = st.recursive(
    leaves, lambda inner: st.lists(inner, max_size=6).map(tuple) | st.lists(inner, max_size=3), max_leaves=20
)


@given(request=requests)
def test_requests_survive_the_wire(request: Request) -> None:
    """`from_wire(to_wire(x)) == x`, with plain tuples in between."""
    wire = to_wire(request)
    assert from_wire(wire) == request
    assert plain_tuples(wire)


@given(reply=replies)
def test_replies_survive_the_wire(reply: Reply) -> None:
    """`reply_from_wire(reply_to_wire(x)) == x`, with plain tuples in between."""
    wire = reply_to_wire(reply)
    assert reply_from_wire(wire) == reply
    assert plain_tuples(wire)


@given(wire=junk)
def test_junk_is_a_wire_error(wire: object) -> None:
    """Nothing but `WireError` comes out of what nobody has sent on purpose."""
    for parse in (from_wire, reply_from_wire):
        with pytest.raises(WireError):
            parse(wire)


@settings(max_examples=300)
@given(request=requests, data=st.data())
def test_a_changed_request_is_right_or_a_wire_error(request: Request, data: st.DataObject) -> None:
    """One item anywhere replaced: either it parses to a request that travels again, or it is refused."""
    wire = mutate(to_wire(request), data)
    try:
        parsed = from_wire(wire)
    except WireError:
        return
    assert from_wire(to_wire(parsed)) == parsed or "nan" in repr(wire)


@settings(max_examples=300)
@given(reply=replies, data=st.data())
def test_a_changed_reply_is_right_or_a_wire_error(reply: Reply, data: st.DataObject) -> None:
    """As for requests."""
    wire = mutate(reply_to_wire(reply), data)
    try:
        parsed = reply_from_wire(wire)
    except WireError:
        return
    assert reply_from_wire(reply_to_wire(parsed)) == parsed


def plain_tuples(value: object) -> bool:
    """Whether a value needs no class by name when it is pickled."""
    if type(value) is tuple:
        return all(plain_tuples(item) for item in value)
    return value is None or type(value) in (int, float, bool, str, bytes)


def mutate(wire: object, data: st.DataObject) -> object:
    """`wire` with one item, at any depth, replaced, removed or doubled."""
    if type(wire) is tuple and wire and data.draw(st.booleans() | st.just(True)):
        at = data.draw(st.integers(0, len(wire) - 1))
        how = data.draw(st.sampled_from(["into", "drop", "double"]))
        if how == "into":
            return (*wire[:at], mutate(wire[at], data), *wire[at + 1 :])
        return wire[:at] + wire[at + 1 :] if how == "drop" else (*wire[:at], wire[at], *wire[at:])
    return data.draw(junk)
