"""Records survive the way through their protos; numbers that mean nothing are refused."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ps.control import convert
from ps.control.api import (
    Admitted,
    DataRange,
    JobSettings,
    Joined,
    Lease,
    LeaseAsk,
    LeaseVerdict,
    Proposal,
    ServerProgress,
    ShardProgress,
    StreamSpec,
    Verdict,
    WorkerProgress,
)
from ps.errors import WireError
from ps.sharding.spec import ModelSignature, ParamSpec
from ps.types import Incarnation, JobState, LeaveReason, MemberState, Role, ShardId
from ps.v1 import coordinator_pb2 as pb
from ps.v1 import types_pb2
from tests.support.control import World

params = st.builds(
    ParamSpec,
    name=st.text(max_size=20).filter(lambda text: text.isprintable()),
    shape=st.lists(st.integers(0, 2**40), max_size=4).map(tuple),
    dtype=st.sampled_from(["float32", "bfloat16", "anything"]),
    group=st.integers(-1, 50),
)


@settings(max_examples=20)
@given(st.builds(ModelSignature, params=st.lists(params, max_size=5).map(tuple), optimizer=st.text(max_size=9)))
def test_signatures(signature: ModelSignature) -> None:
    """A model's signature is what decides whether workers agree: nothing of it may be lost."""
    raw = convert.signature_to_proto(signature).SerializeToString()
    assert convert.signature_from_proto(types_pb2.ModelSignature.FromString(raw)) == signature


def test_shard_maps_and_proposals() -> None:
    """With and without initial weights, with and without a map."""
    world = World()
    world.initialised(servers=2)
    shard_map = world.state.model.shard_map
    assert shard_map is not None
    assert convert.shard_map_from_proto(convert.shard_map_to_proto(shard_map)) == shard_map
    for proposal in (
        Proposal(verdict=Verdict.WAIT, reason="why", shard_map=None),
        Proposal(verdict=Verdict.READY, reason="", shard_map=shard_map),
    ):
        assert convert.proposal_from_proto(convert.proposal_to_proto(proposal)) == proposal


def test_small_records() -> None:
    """Joins, streams, asks, leases, memberships."""
    joined = Joined(
        incarnation=Incarnation(3), name="n", secret=b"\x00" * 16, generation=2,
        settings=JobSettings(exact=True, transports=("shm", "uv"), channels=("cma", "basic"), lease_s=3.5),
    )  # fmt: skip
    assert convert.joined_from_proto(convert.joined_to_proto(joined)) == joined
    spec = StreamSpec(stream=1, length=2, seed=3, epochs=4, shuffle=True)
    assert convert.stream_from_proto(convert.stream_to_proto(spec)) == spec
    ask = LeaseAsk(stream=1, epoch=2, batch_size=3, batches=4, last="drop", barrier=True, batch_s=0.5, ahead=6)
    assert convert.ask_from_proto(convert.ask_to_proto(ask, wait_s=1.5, request=9)) == ask
    part = DataRange(stream=0, epoch=1, begin=2, end=3)
    for lease in (Lease(verdict=LeaseVerdict.RANGE, range=part, batch_sizes=(1,)), Lease(verdict=LeaseVerdict.WAIT)):
        assert convert.lease_from_proto(convert.lease_to_proto(lease)) == lease
    admitted = (Admitted(incarnation=Incarnation(1), role=Role.OBSERVER, secret=b"s" * 16),)
    assert convert.admitted_from_proto(convert.membership_to_proto(7, admitted)) == admitted


def test_heartbeats() -> None:
    """Of workers, of servers, and one that only says "alive"."""
    shard = ShardProgress(shard=ShardId(1), epoch=2, version=3, pushes=4, pulls=5)
    for progress in (
        WorkerProgress(steps=1, samples=2),
        ServerProgress(shards=(shard,), bytes_pushed=6, bytes_pulled=7, staleness={0: 8, 3: 9}),
    ):
        assert convert.heartbeat_from_proto(convert.heartbeat_to_proto(progress)) == progress
    assert convert.heartbeat_from_proto(pb.Heartbeat()) is None


def test_every_enum_value_has_a_number_of_its_own() -> None:
    """A member of an enum that was forgotten in its table would fail only when it is first sent."""
    for role in Role:
        assert convert.role_from_proto(convert.role_to_proto(role)) is role
    for state in MemberState:
        assert convert.member_state_from_proto(convert.member_state_to_proto(state)) is state
    for job in JobState:
        assert convert.job_state_from_proto(convert.job_state_to_proto(job)) is job
    for reason in LeaveReason:
        assert convert.leave_reason_from_proto(convert.leave_reason_to_proto(reason)) is reason


def test_unknown_numbers_are_refused() -> None:
    """UNSPECIFIED and numbers of a newer version."""
    for number in (0, 99):
        with pytest.raises(WireError, match=f"role {number} is not known"):
            convert.role_from_proto(number)
        with pytest.raises(WireError):
            convert.leave_reason_from_proto(number)


def test_sparse_parameters_stay_sparse() -> None:
    """How gradients travel is part of the signature; a message of an older process means dense."""
    params = tuple(
        ParamSpec(name=f"p{index}", shape=(4, 2), dtype="float32", group=0, sparse=bool(index)) for index in range(2)
    )
    signature = ModelSignature(params=params, optimizer="SGD")
    assert convert.signature_from_proto(convert.signature_to_proto(signature)) == signature
    assert not types_pb2.ParamSpec(name="p").sparse


def test_negative_sizes_are_refused() -> None:
    """A plan can't be made of them."""
    signature = types_pb2.ModelSignature(params=[types_pb2.ParamSpec(name="w", shape=[-1], dtype="float32")])
    with pytest.raises(WireError, match="negative"):
        convert.signature_from_proto(signature)
