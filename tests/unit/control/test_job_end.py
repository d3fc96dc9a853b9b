"""When a job is over, and how: decided by data and by scripts that ran to their end, never by counting exits."""

from __future__ import annotations

import pytest

from ps.control.news import Seen
from ps.control.records import Options
from ps.errors import JobFailed, Refused
from ps.types import Incarnation, JobState, LeaveReason, Role
from tests.support.control import MODEL, World, stream


def ended(world: World) -> tuple[JobState, int]:
    return world.state.job.state, world.state.job.record.exit_code


def kill(world: World, member: Incarnation, exit_code: int = -9, *, final: bool = True) -> None:
    """The launcher reports the end of a member's process."""
    found = world.state.members.find(member)
    assert found is not None
    world.state.report_exit(world.now, name=found.name, pid=found.pid, exit_code=exit_code, final=final)
    world.check()


def work_off(world: World, worker: Incarnation) -> None:
    """The worker processes all data that is left."""
    while (lease := world.lease(worker)).range is not None:
        world.state.ack_data(world.now, worker, (lease.range,))
        world.check()


def test_finished_when_the_data_is_done_and_all_have_left() -> None:
    """Not while a worker is still there: it may have results to report."""
    world = World()
    first, second = world.worker(), world.worker()
    world.state.open_stream(world.now, first, stream())
    work_off(world, first)
    world.leave(first)
    assert world.state.job.state is JobState.RUNNING
    world.leave(second)
    assert ended(world) == (JobState.FINISHED, 0)
    assert world.state.job.record.released


def test_a_removed_worker_is_no_success() -> None:
    """Workers that drained or died leave work behind: the job goes on, and fails only after `no_workers_s`."""
    world = World(Options(no_workers_s=60.0))
    first, second = world.worker(), world.worker()
    world.state.open_stream(world.now, first, stream())
    world.leave(first, LeaveReason.DRAINED)
    kill(world, second, final=False)
    world.pass_time(59.0)
    assert world.state.job.state is JobState.WAITING
    third = world.worker()
    world.state.open_stream(world.now, third, stream())
    work_off(world, third)
    world.leave(third)
    assert ended(world) == (JobState.FINISHED, 0)


def test_failed_without_workers_for_too_long() -> None:
    """The reason says for how long and how much was left."""
    world = World(Options(no_workers_s=60.0))
    worker = world.worker()
    world.state.open_stream(world.now, worker, stream())
    world.leave(worker, LeaveReason.DRAINED)
    world.pass_time(61.0)
    assert ended(world)[0] is JobState.FAILED
    assert world.state.job.record.reason == "no worker for 60 s (no_workers_s); 0 of 100 samples done"


def test_an_unstarted_job_waits_for_ever() -> None:
    """Start order does not matter: before the first worker has come there is no bound."""
    world = World(Options(no_workers_s=60.0))
    world.server()
    world.pass_time(500.0)
    assert world.state.job.state is JobState.WAITING


def test_every_script_done_ends_a_job_whose_data_is_not() -> None:
    """Scripts may stop early on purpose: all of them said so."""
    world = World()
    worker = world.worker()
    world.state.open_stream(world.now, worker, stream())
    world.leave(worker, LeaveReason.DONE)
    assert ended(world) == (JobState.FINISHED, 0)


def test_done_and_dead_together_do_not_finish_unfinished_data() -> None:
    """One script done, another one killed, samples left: not finished."""
    world = World()
    first, second = world.worker(), world.worker()
    world.state.open_stream(world.now, first, stream())
    kill(world, second, final=False)
    world.leave(first, LeaveReason.DONE)
    assert not world.state.job.over


def test_a_job_without_data_waits_for_all_its_workers() -> None:
    """With min_workers=2, the first script's end is not the job's when the second has not come yet."""
    world = World(Options(min_workers=2))
    world.leave(world.worker())
    assert not world.state.job.over
    world.leave(world.worker())
    assert ended(world) == (JobState.FINISHED, 0)


def test_a_killed_worker_is_no_failure_while_others_live() -> None:
    """Killed by a signal: evicted at once, its ranges go to the others, who finish."""
    world = World()
    first, second = world.worker(), world.worker()
    world.state.open_stream(world.now, first, stream())
    world.lease(second)
    kill(world, second)
    work_off(world, first)
    world.leave(first)
    assert ended(world) == (JobState.FINISHED, 0)


def test_the_last_worker_killed_for_good_fails_the_job_at_once() -> None:
    """Nobody will follow: no reason to wait `no_workers_s`."""
    world = World(Options(min_workers=1))
    worker = world.worker()
    world.state.open_stream(world.now, worker, stream())
    kill(world, worker)
    assert ended(world)[0] is JobState.FAILED
    assert "none will follow" in world.state.job.record.reason


def test_an_early_death_does_not_fail_a_job_whose_workers_are_still_starting() -> None:
    """With min_workers=2 one worker killed for good before the other has joined is not the end."""
    world = World(Options(min_workers=2))
    kill(world, world.worker())
    assert not world.state.job.over
    second = world.worker()
    world.leave(second)
    assert ended(world) == (JobState.FINISHED, 0)


def test_a_script_that_fails_fails_the_job_with_its_exit_code() -> None:
    """Others are told, with the reason; whoever asks for data or joins is refused."""
    world = World()
    first, second = world.worker("a"), world.worker("b")
    world.state.leave(world.now, first, LeaveReason.FAILED, exit_code=3, detail="SystemExit: 3")
    world.check()
    assert ended(world) == (JobState.FAILED, 3)
    news = world.state.news(second, Seen())
    assert news.job is not None
    assert news.job.state is JobState.FAILED
    assert "script of a (incarnation 1" in news.job.reason
    assert "SystemExit: 3" in news.job.reason
    with pytest.raises(JobFailed, match="SystemExit: 3"):
        world.state.propose(world.now, second, MODEL)
    with pytest.raises(JobFailed):
        world.join(Role.WORKER)


@pytest.mark.parametrize("joined", [True, False])
def test_an_exit_code_without_a_goodbye_fails_the_job(joined: bool) -> None:
    """os._exit(3), or a script that dies before it joins: the launcher's report is all there is."""
    world = World()
    if joined:
        kill(world, world.worker(), exit_code=3)
    else:
        world.state.report_exit(world.now, name="worker-0", pid=5, exit_code=3, final=True)
        world.check()
    assert ended(world) == (JobState.FAILED, 3)


def test_a_report_about_an_older_process_of_that_name_is_ignored() -> None:
    """The launcher's report comes late: a new process of the same name has joined; it must not be evicted."""
    world = World()
    world.worker("w")
    world.state.report_exit(world.now, name="w", pid=999_999, exit_code=-9, final=False)
    world.check()
    assert not world.state.job.over
    assert len(world.state.members.live(Role.WORKER)) == 1


def test_a_server_lost_with_its_shards_fails_the_job() -> None:
    """There is no second copy yet; the reason says so. A server without shards may go."""
    world = World()
    spare_world = World()
    spare_world.initialised()
    kill(spare_world, spare_world.server("spare"))
    assert not spare_world.state.job.over
    (server,), _ = world.initialised()
    kill(world, server)
    assert ended(world)[0] is JobState.FAILED
    assert "held shards" in world.state.job.record.reason


def test_a_server_that_dies_before_the_model_is_placed() -> None:
    """For good: the job can never start. Otherwise: it waits for the next one."""
    world = World()
    kill(world, world.server(), exit_code=1, final=False)
    assert not world.state.job.over
    kill(world, world.server(), exit_code=1, final=True)
    assert ended(world)[0] is JobState.FAILED
    assert "before the model was placed" in world.state.job.record.reason


def test_held_jobs_are_released_by_hand() -> None:
    """With hold the launcher saves the model between the end and the release; observers may still join."""
    world = World(Options(hold=True))
    server = world.server()
    with pytest.raises(Refused, match="release comes after"):
        world.state.release(world.now)
    world.leave(world.worker())
    assert ended(world) == (JobState.FINISHED, 0)
    news = world.state.news(server, Seen())
    assert news.job is not None
    assert not news.job.released
    world.join(Role.OBSERVER)
    with pytest.raises(Refused, match=r"over \(finished\)"):
        world.join(Role.WORKER)
    world.state.release(world.now)
    world.check()
    news = world.state.news(server, news.seen)
    assert news.job is not None
    assert news.job.released


def test_the_first_end_counts() -> None:
    """What comes after the end changes neither outcome nor reason."""
    world = World()
    worker = world.worker()
    world.state.stop(world.now, interrupted=True, reason="operator")
    world.check()
    world.state.leave(world.now, worker, LeaveReason.FAILED, exit_code=1, detail="KeyboardInterrupt")
    world.check()
    assert ended(world) == (JobState.INTERRUPTED, 0)
    assert world.state.job.record.reason == "operator"


def test_training_time_stops_with_the_job() -> None:
    """Seconds in the summary run from the first weights to the end."""
    world = World()
    world.pass_time(10.0)
    _, worker = world.initialised()
    world.pass_time(5.0)
    world.leave(worker)
    world.pass_time(7.0)
    assert world.state.job.elapsed_s(world.now) == pytest.approx(5.0)
