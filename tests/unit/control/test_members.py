"""Joining, liveness, fencing and what servers are told about members."""

from __future__ import annotations

import pytest

from ps import secrets
from ps.control.api import JobSettings
from ps.control.membership import ID_BLOCK, KEPT_FINAL, NameTaken
from ps.control.news import Seen
from ps.control.records import IdsRecord, Options, Replay
from ps.errors import Fenced, Refused, WireError
from ps.types import MAX_INCARNATION, Incarnation, LeaveReason, MemberState, Role
from tests.support.control import MODEL, World


def test_incarnations_are_reserved_before_they_are_handed_out() -> None:
    """The record that reserves a block comes before the first member of it, once per block."""
    world = World(Options(max_members=1000))
    for _ in range(ID_BLOCK + 1):
        world.join(Role.WORKER)
    kinds = [type(record).__name__ for record in world.records]
    assert kinds[:2] == ["IdsRecord", "MemberRecord"]
    reserved = [record.reserved_end for record in world.records if isinstance(record, IdsRecord)]
    assert reserved == [1 + ID_BLOCK, 1 + 2 * ID_BLOCK]


def test_incarnations_run_out_with_a_clear_error() -> None:
    """The last incarnation is used, then joins are refused; RPC ids above it are callers' aliases."""
    world = World(replay=Replay(reserved_end=MAX_INCARNATION))
    assert world.join(Role.WORKER).incarnation == MAX_INCARNATION
    with pytest.raises(Refused, match="all 16383 incarnations"):
        world.join(Role.WORKER)


def test_members_without_a_name_get_the_lowest_free_one() -> None:
    """server-0, worker-0, worker-1; a name is free again once its owner has left."""
    world = World()
    names = [world.join(role).name for role in (Role.SERVER, Role.WORKER, Role.WORKER, Role.OBSERVER)]
    assert names == ["server-0", "worker-0", "worker-1", "observer-0"]
    world.leave(Incarnation(2))
    assert world.join(Role.WORKER).name == "worker-0"


def test_a_living_members_name_is_taken_and_a_lost_ones_is_not() -> None:
    """A process of the same name replaces one whose session is gone, and only such a one."""
    world = World()
    first = world.join(Role.WORKER, "w")
    with pytest.raises(NameTaken, match="'w' belongs to w"):
        world.join(Role.WORKER, "w")
    world.state.close_session(world.now, first.incarnation, 1)
    second = world.join(Role.WORKER, "w")
    assert second.incarnation > first.incarnation
    with pytest.raises(Fenced, match="replaced by a new process"):
        world.state.heartbeat(world.now, first.incarnation, None)


def test_names_are_checked() -> None:
    """A name travels into RPC names, files and logs: only letters, digits, - and _."""
    for wrong in ("a b", "../x", "x" * 65, "ä"):
        with pytest.raises(WireError, match="member name"):
            World().join(Role.WORKER, wrong)


def test_a_retried_join_makes_one_member() -> None:
    """The same nonce gets the same incarnation and secret, since the first answer may have been lost."""
    world = World()
    for secret in (b"1" * 16, b"2" * 16):
        joined = world.state.join(world.now, role=Role.WORKER, name="", host="h", pid=1, secret=secret, nonce=b"n" * 16)
        world.check()
    assert joined.secret == b"1" * 16
    assert len(list(world.state.members)) == 1


def test_the_member_limit_counts_the_living() -> None:
    """One more than `max_members` is refused; who left makes room."""
    world = World(Options(max_members=2))
    first = world.join(Role.WORKER)
    world.join(Role.WORKER)
    with pytest.raises(Refused, match="2 members, its limit"):
        world.join(Role.WORKER)
    world.leave(first.incarnation, LeaveReason.DRAINED)
    world.join(Role.WORKER)


def test_death_needs_a_lost_session_and_an_expired_lease() -> None:
    """Silence alone kills nobody, nor does a lost session alone; both together do."""
    world = World(Options(settings=JobSettings(heartbeat_s=1.0, lease_s=10.0)))
    silent, lost = world.worker(), world.worker()
    world.pass_time(60.0)
    assert world.state.members.get(silent).state is MemberState.LIVE
    world.state.heartbeat(world.now, lost, None)
    world.state.close_session(world.now, lost, world.state.members.get(lost).session)
    world.pass_time(9.0)
    assert world.state.members.get(lost).state is MemberState.LIVE
    world.pass_time(2.0)
    with pytest.raises(Fenced, match="no session and no heartbeat for 10"):
        world.state.heartbeat(world.now, lost, None)


def test_a_new_session_replaces_the_old_one() -> None:
    """When the old stream's end is noticed late, the member is not taken for lost."""
    world = World()
    joined = world.join(Role.WORKER)
    old = world.state.members.get(joined.incarnation).session
    world.state.open_session(world.now, joined.incarnation)
    world.state.close_session(world.now, joined.incarnation, old)
    assert world.state.members.get(joined.incarnation).session


def test_the_coordinators_own_stall_is_not_charged_to_members() -> None:
    """A tick that comes 60 s late evicts nobody, although every lease looks expired."""
    world = World(Options(settings=JobSettings(heartbeat_s=1.0, lease_s=10.0)))
    worker = world.worker()
    world.pass_time(1.0)
    world.state.close_session(world.now, worker, world.state.members.get(worker).session)
    world.now += 60.0
    world.state.tick(world.now)
    world.check()
    assert world.state.members.get(worker).state is MemberState.LIVE
    world.pass_time(11.0)
    assert world.state.members.find(worker) is not None
    with pytest.raises(Fenced):
        world.state.heartbeat(world.now, worker, None)


def test_ready_waits_for_every_live_server() -> None:
    """A worker is known once each live server has installed a membership with it; dead ones are not waited for."""
    world = World()
    first, second = world.server(), world.server()
    worker = world.worker()
    assert world.state.known(worker) is None
    world.install(first)
    assert world.state.known(worker) is None
    member = world.state.members.get(second)
    world.state.report_exit(world.now, name=member.name, pid=member.pid, exit_code=-9, final=False)
    world.check()
    assert world.state.known(worker) == world.state.members.version


def test_servers_must_say_where_they_are() -> None:
    """An address without a port, or with port 0, is refused: nobody could dial it."""
    world = World()
    joined = world.join(Role.SERVER)
    for wrong in ("", "uv://10.0.0.5", "uv://10.0.0.5:0"):
        with pytest.raises(WireError, match="nobody can dial"):
            world.state.ready(world.now, joined.incarnation, wrong)


def test_servers_hear_of_ready_workers_and_observers_with_secrets_of_their_own() -> None:
    """The membership lists who is live, with a secret derived for this server; who left is gone from it."""
    world = World()
    server, worker = world.server(), world.worker()
    world.join(Role.WORKER)  # not ready: not admitted
    observer = world.join(Role.OBSERVER)
    world.state.ready(world.now, observer.incarnation, "")
    world.check()
    news = world.state.news(server, Seen())
    assert news.membership is not None
    version, admitted = news.membership
    assert [(a.incarnation, a.role) for a in admitted] == [
        (worker, Role.WORKER),
        (observer.incarnation, Role.OBSERVER),
    ]
    secret = world.state.members.get(worker).secret
    assert admitted[0].secret == secrets.derive(secret, server)
    assert world.state.news(server, news.seen).membership is None
    world.leave(worker)
    later = world.state.news(server, news.seen)
    assert later.membership is not None
    assert later.membership[0] > version
    assert [a.incarnation for a in later.membership[1]] == [observer.incarnation]


def test_only_servers_hear_of_memberships() -> None:
    """Workers never see each other's secrets."""
    world = World()
    world.server()
    first, _ = world.worker(), world.worker()
    assert world.state.news(first, Seen()).membership is None


def test_members_that_are_out_are_told_so() -> None:
    """Evicted, left and unknown incarnations are fenced, in news and in every event."""
    world = World()
    worker = world.worker()
    world.leave(worker, LeaveReason.DRAINED)
    assert world.state.news(worker, Seen()).fenced == "drained"
    assert world.state.news(Incarnation(999), Seen()).fenced == "unknown incarnation"
    for incarnation in (worker, Incarnation(999)):
        with pytest.raises(Fenced):
            world.state.open_session(world.now, incarnation)
        with pytest.raises(Fenced):
            world.state.propose(world.now, incarnation, MODEL)
    world.leave(worker)  # a retried goodbye is fine


def test_acknowledgements_of_the_future_are_cut() -> None:
    """A member can't claim to have installed what does not exist yet."""
    world = World()
    server = world.server()
    world.state.installed(world.now, server, membership=1 << 60, map_epoch=99)
    world.check()
    worker = world.worker()
    assert world.state.known(worker) is None


def test_old_members_are_forgotten() -> None:
    """The table is bounded; the samples of forgotten workers still count."""
    world = World(Options(no_workers_s=1e9))
    world.worker()
    for _ in range(KEPT_FINAL + 10):
        world.leave(world.worker(), LeaveReason.DRAINED)
    assert len(list(world.state.members)) == KEPT_FINAL + 1
    assert world.state.members.find(Incarnation(2)) is None
    assert world.state.job.record.workers_seen == KEPT_FINAL + 11


def test_secrets_are_not_printed() -> None:
    """Neither members nor records nor answers show a secret."""
    world = World()
    secret = b"very secret 1234"
    joined = world.state.join(world.now, role=Role.WORKER, name="", host="h", pid=1, secret=secret)
    member = world.state.members.get(joined.incarnation)
    for thing in (joined, member, str(member), world.state.records()):
        assert "very secret" not in repr(thing)


def test_members_that_run_something_else_are_warned_about(caplog: pytest.LogCaptureFixture) -> None:
    """Different torch versions or CPU capabilities may differ in the last bits; who can't tell is left alone."""
    world = World()
    for runs in ("2.13.0 AVX2", "", "2.13.0 AVX2", "2.14.0 AVX2"):
        world.state.join(world.now, role=Role.WORKER, name="", host="h", pid=1, secret=b"s" * 16, runs=runs)
    warnings = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert len(warnings) == 1
    assert "worker-3" in warnings[0]
    assert "runs 2.14.0 AVX2, but worker-0" in warnings[0]
