"""The model's agreement, data leases as the state hands them out, restarts."""

from __future__ import annotations

from dataclasses import replace

import pytest

from ps.control.api import JobSettings, LeaseVerdict, ServerProgress, ShardProgress, Verdict, WorkerProgress
from ps.control.news import Seen
from ps.control.records import Options, Replay
from ps.control.report import status, summary
from ps.errors import ModelMismatch, Refused, UnsupportedError
from ps.sharding.spec import ParamSpec
from ps.types import Incarnation, JobState, LeaveReason, Role, ShardId
from tests.support.control import MODEL, World, ask, stream


def test_the_model_is_placed_once_enough_servers_are_live() -> None:
    """WAIT names what is missing; then the first proposer initialises, after the servers have the map."""
    world = World(Options(servers=2))
    first, worker = world.server(), world.worker()
    proposal = world.state.propose(world.now, worker, MODEL)
    assert (proposal.verdict, proposal.reason) == (Verdict.WAIT, "1 of 2 servers are there")
    second = world.server()
    assert world.state.propose(world.now, worker, MODEL).verdict is Verdict.WAIT
    for server in (first, second):
        world.install(server)
    proposal = world.state.propose(world.now, worker, MODEL)
    assert proposal.verdict is Verdict.INITIALISE
    assert proposal.shard_map is not None
    assert {holder.incarnation for holder in proposal.shard_map.holders} == {first, second}
    assert proposal.shard_map.initialised_by is None


def test_initial_weights_are_written_by_one_worker() -> None:
    """Others wait for the initialiser; when it has finished they get the map, one epoch newer."""
    world = World()
    server, first, second = world.server(), world.worker(), world.worker()
    world.state.propose(world.now, first, MODEL)
    world.install(server)
    proposal = world.state.propose(world.now, second, MODEL)
    assert (proposal.verdict, proposal.reason) == (Verdict.WAIT, f"incarnation {first} writes the initial weights")
    with pytest.raises(Refused, match="was not told to write"):
        world.state.finish_init(world.now, second)
    world.state.finish_init(world.now, first)
    world.state.finish_init(world.now, first)  # a retry
    assert world.state.map_in_force() is None
    world.install(server)
    shard_map = world.state.map_in_force()
    assert shard_map is not None
    assert (shard_map.epoch, shard_map.initialised_by) == (2, first)
    assert world.state.propose(world.now, second, MODEL).verdict is Verdict.READY
    assert world.state.job.state is JobState.RUNNING


def test_a_dead_initialiser_is_replaced() -> None:
    """The next worker writes the initial weights anew."""
    world = World()
    server, first, second = world.server(), world.worker(), world.worker()
    world.state.propose(world.now, first, MODEL)
    world.install(server)
    member = world.state.members.get(first)
    world.state.report_exit(world.now, name=member.name, pid=member.pid, exit_code=-9, final=True)
    world.check()
    assert world.state.propose(world.now, second, MODEL).verdict is Verdict.INITIALISE
    world.check()


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (
            replace(MODEL, params=(replace(MODEL.params[0], shape=(64, 33)), MODEL.params[1])),
            r"parameter 0 is 'weight' \[64, 33\] float32 \(group 0\) here, 'weight' \[64, 32\] float32 \(group 0\) in",
        ),
        (replace(MODEL, params=(MODEL.params[0], replace(MODEL.params[1], dtype="float64"))), "'bias'.*float64.*here"),
        (replace(MODEL, params=MODEL.params[:1]), r"1 parameters here, 2 in the job; .* only the job has is 'bias'"),
        (
            replace(MODEL, params=(*MODEL.params, ParamSpec(name="extra", shape=(1,), dtype="float32", group=-1))),
            r"only this worker has is 'extra' \[1\] float32 \(no group\)",
        ),
        (replace(MODEL, optimizer="Adam"), "optimizer Adam here, SGD in the job"),
        (replace(MODEL, whole_tensors=True), "whole_tensors=True here"),
    ],
)
def test_a_different_model_is_refused_by_its_first_difference(other: object, message: str) -> None:
    """The second worker reads which parameter differs, with both shapes and dtypes."""
    world = World()
    world.initialised()
    with pytest.raises(ModelMismatch, match=message):
        world.state.propose(world.now, world.worker(), other)  # type: ignore[arg-type]


def test_a_model_that_cant_be_sharded_is_refused() -> None:
    """The reason names the parameter, and the next model may still be placed."""
    world = World()
    world.server()
    worker = world.worker()
    with pytest.raises(UnsupportedError, match="'bits'"):
        world.state.propose(
            world.now,
            worker,
            replace(MODEL, params=(ParamSpec(name="bits", shape=(3,), dtype="int8", group=0),)),
        )
    world.check()
    assert world.state.propose(world.now, worker, MODEL).verdict is Verdict.WAIT


def test_data_waits_for_min_workers_once() -> None:
    """Nobody gets a range before two workers are live; afterwards one alone is enough."""
    world = World(Options(min_workers=2))
    first = world.worker()
    world.state.open_stream(world.now, first, stream())
    assert world.lease(first).verdict is LeaseVerdict.WAIT
    second = world.worker()
    assert world.lease(first).verdict is LeaseVerdict.RANGE
    world.leave(second, LeaveReason.DRAINED)
    assert world.lease(first).verdict is LeaseVerdict.RANGE


def test_min_workers_does_not_wait_for_the_dead() -> None:
    """A worker that was killed before it was live, and will not be started again, is not waited for."""
    world = World(Options(min_workers=2))
    first = world.worker()
    world.state.open_stream(world.now, first, stream())
    world.state.report_exit(world.now, name="worker-1", pid=77, exit_code=-9, final=True)
    world.check()
    assert world.lease(first).verdict is LeaseVerdict.RANGE


def test_a_retried_lease_gets_the_same_range() -> None:
    """The answer to the first try may be lost: the same request number must not lease another range."""
    world = World()
    worker = world.worker()
    world.state.open_stream(world.now, worker, stream())
    assert world.lease(worker, number=1) == world.lease(worker, number=1)
    assert world.lease(worker, number=2) != world.lease(worker, number=1)


def test_only_workers_lease_data() -> None:
    """Observers read weights; they are no workers and are not counted as such."""
    world = World()
    observer = world.join(Role.OBSERVER)
    with pytest.raises(Refused, match="no worker"):
        world.state.lease(world.now, observer.incarnation, ask())
    assert world.state.job.record.workers_seen == 0


def test_a_script_without_a_model_is_live_with_its_data() -> None:
    """Opening a stream makes a worker live: it works."""
    world = World()
    joined = world.join(Role.WORKER)
    world.state.open_stream(world.now, joined.incarnation, stream())
    world.check()
    assert world.state.job.record.workers_seen == 1
    assert world.lease(joined.incarnation).verdict is LeaseVerdict.RANGE


def restarted(world: World) -> World:
    """The coordinator again, from the records (journal round trips are tested with the journal)."""
    replay = Replay(generation=world.state.generation + 1, reserved_end=1000, job=world.state.job.record)
    replay.members = [member.record() for member in world.state.members]
    replay.numbers = dict(world.state.numbers)
    return World(world.options, replay, world.now)


def test_a_restarted_coordinator_gives_everybody_a_full_lease() -> None:
    """Members could not renew while nobody listened; who does not come back is evicted a lease later."""
    world = World(Options(settings=JobSettings(heartbeat_s=1.0, lease_s=10.0)))
    back, gone = world.worker(), world.worker()
    again = restarted(world)
    again.check()
    again.state.open_session(again.now, back)
    again.pass_time(9.0)
    assert not again.state.members.get(gone).ended
    again.pass_time(2.0)
    assert again.state.news(gone, Seen()).fenced
    assert again.state.news(back, Seen()).fenced is None


def test_membership_versions_rise_across_restarts() -> None:
    """A server that has installed version v of the old coordinator must not ignore the new one's first."""
    world = World()
    server = world.server()
    for _ in range(5):
        world.worker()
    old = world.state.members.version
    again = restarted(world)
    news = again.state.news(server, Seen())
    assert news.membership is not None
    assert news.membership[0] > old


def test_a_restarted_coordinator_counts_idle_time_anew() -> None:
    """After a restart workers get `no_workers_s` to come back; then the job has failed."""
    world = World(Options(no_workers_s=60.0))
    world.leave(world.worker(), LeaveReason.DRAINED)
    world.pass_time(50.0)
    again = restarted(world)
    again.pass_time(50.0)
    assert not again.state.job.over
    again.pass_time(11.0)
    assert again.state.job.state is JobState.FAILED


def test_status_and_summary_add_up_what_servers_report() -> None:
    """A push goes to every shard and counts once; staleness and bytes are summed over servers."""
    world = World()
    servers, worker = world.initialised(servers=2)
    plan = world.state.model.plan
    assert plan is not None
    for index, server in enumerate(servers):
        shards = tuple(
            ShardProgress(shard=ShardId(holder.shard), epoch=1, version=7, pushes=7, pulls=8 + index)
            for holder in world.state.model.shard_map.holders  # type: ignore[union-attr]
            if holder.incarnation == server
        )
        world.state.heartbeat(
            world.now, server, ServerProgress(shards=shards, bytes_pushed=100, bytes_pulled=50, staleness={0: 3, 2: 1})
        )
    world.state.heartbeat(world.now, worker, WorkerProgress(steps=7, samples=70))
    world.state.report(world.now, worker, {"accuracy": 0.5})
    world.state.report(world.now, worker, {"accuracy": 0.9})
    world.now += 10.0
    content = summary(world.state, world.now)
    assert content["pushes"] == 7
    assert (content["bytes_pushed"], content["bytes_pulled"]) == (200, 100)
    assert content["staleness"] == {"mean": 0.5, "max": 2, "histogram": {"0": 6, "2": 2}}
    assert (content["samples"], content["seconds"], content["samples_per_s"]) == (70, 10.0, 7.0)
    assert content["final"] == {"accuracy": 0.9}
    reply = status(world.state, world.now)
    assert [shard.version for shard in reply.shards] == [7] * len(plan.shards)
    assert {shard.holder for shard in reply.shards} == {"server-0", "server-1"}
    assert sum(shard.bytes for shard in reply.shards) == plan.nbytes
    assert reply.progress.workers_live == 1


def test_reported_numbers_are_bounded() -> None:
    """A script that makes up a new name each step is refused, and nothing of that report is kept."""
    world = World()
    worker = world.worker()
    with pytest.raises(Refused, match="more than 1000 names"):
        world.state.report(world.now, worker, {str(i): 0.0 for i in range(1001)})
    assert world.state.numbers == {}


def test_events_in_the_past_are_a_bug() -> None:
    """Time is monotonic; an older `now` means that somebody mixes clocks."""
    world = World()
    world.worker()
    with pytest.raises(AssertionError):
        world.state.tick(world.now - 1.0)


def test_incarnations_survive_as_plain_numbers() -> None:
    """Names and ids in status are those that members got."""
    world = World()
    server = world.server("alpha")
    member = status(world.state, world.now).members[0]
    assert (member.name, member.incarnation) == ("alpha", int(Incarnation(server)))
