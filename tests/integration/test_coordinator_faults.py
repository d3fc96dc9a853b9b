"""The coordinator and its members under kills, freezes, restarts, signals and forks."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest

from ps.control import client
from ps.control.api import LeaseVerdict, Verdict
from ps.control.client import GrpcControl
from ps.errors import CoordinatorLost, ForkedProcess, Refused
from ps.types import Address, JobState, LeaveReason, MemberState, Role
from tests.support.control import MODEL, ask, stream
from tests.support.coordinator import (
    BOUND_S,
    ROOT,
    CoordinatorProcess,
    Heard,
    Member,
    RunningCoordinator,
    config_in,
    coordinator,
)
from tests.support.polling import assert_eventually


def test_a_killed_coordinator_takes_everybody_over_again(tmp_path: Path) -> None:
    """After kill -9 and a restart: same incarnations, same map, no sample lost or repeated, generation one higher."""
    config = config_in(tmp_path, servers=1)
    first = CoordinatorProcess(config)
    address = first.address
    with first, Member(address, Role.SERVER) as server, Member(address, Role.WORKER) as worker:
        server.ready()
        assert worker.ready().control.propose_model(MODEL).verdict is Verdict.INITIALISE
        shard_map = worker.control.finish_init()
        worker.control.open_stream(stream())
        done, held = worker.control.lease(ask(batches=1)), worker.control.lease(ask(batches=1))
        assert done.range is not None
        assert held.range is not None
        worker.control.ack((done.range,))
        first.kill()
        with CoordinatorProcess(config_in(tmp_path, port=address.port)):
            worker.control.ack((held.range,))  # leased before the kill; retried until the coordinator is back
            status = client.status(address)
            assert status.generation == 2
            assert status.progress.samples == 20
            assert [m.incarnation for m in status.members] == [0, 1, 2]
            assert worker.control.propose_model(MODEL).shard_map == shard_map
            rest = worker.control.lease(ask(batches=1))
            assert rest.range is not None
            assert rest.range.begin == 20
            with Member(address, Role.WORKER) as newcomer:
                assert newcomer.joined.incarnation > 2
                newcomer.ready()  # the server has come back and acknowledges it
                assert newcomer.joined.incarnation in [a.incarnation for a in server.heard.admitted]


def test_a_coordinator_that_stays_away_is_lost(tmp_path: Path) -> None:
    """Members hear `on_lost` within the bound, and every call from then on says why."""
    config = config_in(tmp_path, lost_coordinator_s=0.5)
    with CoordinatorProcess(config) as process, Member(process.address, Role.WORKER) as worker:
        process.kill()
        worker.heard.wait_until(lambda heard: heard.lost)
        assert f"no coordinator at {process.address} for 0.5 s" in worker.heard.lost
        with pytest.raises(CoordinatorLost, match=r"for 0\.5 s"):
            worker.control.report({"a": 1.0})


def test_a_silent_listener_is_no_coordinator() -> None:
    """Somebody accepts the connection and says nothing: the join ends within its bound all the same."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        control = GrpcControl(Address("127.0.0.1", listener.getsockname()[1]))
        try:
            with pytest.raises(CoordinatorLost, match=r"gave no answer for 0\.5 s"):
                control.join(role=Role.WORKER, timeout_s=0.5)
        finally:
            control.close()


def test_another_service_is_no_coordinator(tmp_path: Path) -> None:
    """A gRPC server of something else answers UNIMPLEMENTED: refused at once, without retries."""
    server = grpc.server(ThreadPoolExecutor(1), options=[("grpc.so_reuseport", 0)])
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    control = GrpcControl(Address("127.0.0.1", port))
    try:
        with pytest.raises(Refused, match="no torch-ps coordinator"):
            control.join(role=Role.WORKER, timeout_s=BOUND_S)
    finally:
        control.close()
        server.stop(0).wait(BOUND_S)


MEMBER = """
import sys, threading
from ps.types import Address, Role
from tests.support.coordinator import Heard, Member
heard = Heard()
with Member(Address.parse(sys.argv[1]), Role.WORKER, sys.argv[2], heard) as member:
    member.ready()
    print("ready", flush=True)
    heard.wait_until(lambda h: h.fenced)
    print("fenced:", heard.fenced, flush=True)
"""


def member_process(address: Address, name: str) -> subprocess.Popen[str]:
    """A worker in a process of its own, live when this returns."""
    process = subprocess.Popen(
        [sys.executable, "-c", MEMBER, str(address), name], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


def state_of(running: RunningCoordinator, name: str) -> MemberState | None:
    """A member's state, by name."""
    member = running.do(lambda state, now: state.members.named(name))
    return member.state if member is not None else None


def test_a_frozen_member_is_evicted_and_fenced_when_it_is_back(tmp_path: Path) -> None:
    """SIGSTOP leaves the connection up; unanswered pings end the session, then the lease; SIGCONT brings a fence."""
    with coordinator(tmp_path, heartbeat_s=0.1, lease_s=1.0) as running:
        process = member_process(running.address, "frozen")
        try:
            process.send_signal(signal.SIGSTOP)
            assert_eventually(lambda: state_of(running, "frozen") is MemberState.DEAD)
            process.send_signal(signal.SIGCONT)
            out, _ = process.communicate(timeout=BOUND_S)
            assert out.startswith("fenced: ")
        finally:
            process.kill()
            process.communicate()


def test_a_killed_member_is_evicted_after_its_lease(tmp_path: Path) -> None:
    """Nobody reports the exit: the broken session and the lease are enough."""
    with coordinator(tmp_path, heartbeat_s=0.1, lease_s=0.5) as running:
        process = member_process(running.address, "killed")
        process.kill()
        process.communicate()
        assert_eventually(lambda: state_of(running, "killed") is MemberState.DEAD)


def test_a_frozen_coordinator_evicts_nobody(tmp_path: Path) -> None:
    """After SIGSTOP for three leases and SIGCONT, members are still in, and their calls go through."""
    config = config_in(tmp_path, heartbeat_s=0.1, lease_s=0.5)
    with CoordinatorProcess(config) as process, Member(process.address, Role.WORKER) as worker:
        worker.ready()
        process.process.send_signal(signal.SIGSTOP)
        threading.Event().wait(1.5)  # the length of the stall is what is tested
        process.process.send_signal(signal.SIGCONT)
        worker.control.open_stream(stream())
        assert worker.control.lease(ask()).verdict is LeaseVerdict.RANGE
        assert not worker.heard.fenced


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_the_job_as_interrupted(tmp_path: Path, number: signal.Signals) -> None:
    """Members are told, the summary is written, the exit code is 130."""
    with CoordinatorProcess(config_in(tmp_path, hold=True)) as process:
        with Member(process.address, Role.WORKER) as worker:
            process.process.send_signal(number)
            worker.heard.wait_until(lambda heard: heard.job[0] is JobState.INTERRUPTED)
            assert number.name in worker.heard.job[1]
            worker.control.leave(LeaveReason.DRAINED)
        assert process.process.wait(BOUND_S) == 130
    assert json.loads((tmp_path / "summary.json").read_text())["outcome"] == "interrupted"


def test_a_second_signal_ends_the_coordinator_now(tmp_path: Path) -> None:
    """The worker does not leave; the first signal waits for it, the second does not."""
    with CoordinatorProcess(config_in(tmp_path)) as process, Member(process.address, Role.WORKER) as worker:
        process.process.send_signal(signal.SIGINT)
        worker.heard.wait_until(lambda heard: heard.job[0] is JobState.INTERRUPTED)
        assert process.process.poll() is None
        process.process.send_signal(signal.SIGINT)
        assert process.process.wait(BOUND_S) == 130


SIGNALLED = """
import signal, sys, threading
from ps.control.client import GrpcControl
from ps.types import Address, Role
from tests.support.control import ask, stream
from tests.support.coordinator import Heard, Member

class Stop(BaseException): pass  # as KeyboardInterrupt: libraries catch Exception
def stop(*_): raise Stop
signal.signal(signal.SIGTERM, stop)
with Member(Address.parse(sys.argv[1]), Role.WORKER) as member:
    member.control.open_stream(stream(length=10))
    try:
        print("waiting", flush=True)
        while True:
            member.control.lease(ask(), wait_s=60.0)
    except Stop:
        print("stopped", flush=True)
left = [t.name for t in threading.enumerate() if t.name.startswith("ps-")]
print("threads", left, flush=True)
"""


def test_signals_run_while_the_main_thread_waits(tmp_path: Path) -> None:
    """A handler that raises ends a wait of 60 s at once; after `close` no thread of ours is left."""
    with coordinator(tmp_path) as running, Member(running.address, Role.WORKER) as other:
        other.control.open_stream(stream(length=10))
        assert other.control.lease(ask()).verdict is LeaseVerdict.RANGE
        process = subprocess.Popen(
            [sys.executable, "-c", SIGNALLED, str(running.address)], cwd=ROOT, stdout=subprocess.PIPE, text=True
        )
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "waiting\n"
            process.send_signal(signal.SIGTERM)
            out, _ = process.communicate(timeout=BOUND_S)
            assert out == "stopped\nthreads []\n"
            assert process.returncode == 0
        finally:
            process.kill()
            process.communicate()


FORKING = """
import os, sys
from ps.errors import ForkedProcess
from ps.types import Address, LeaveReason, Role
from tests.support.coordinator import Member

with Member(Address.parse(sys.argv[1]), Role.WORKER, "parent") as member:
    member.ready()
    refused = 0
    if (child := os.fork()) == 0:
        calls = (
            lambda: member.control.report({"a": 1.0}), member.control.shard_map, lambda: member.control.ready(""),
            lambda: member.control.leave(LeaveReason.DONE), lambda: member.control.lease(None),
        )
        for call in calls:
            try:
                call()
            except ForkedProcess:
                refused += 1
            except AttributeError:
                pass
        member.control.close()
        sys.exit(refused)  # an orderly end of the interpreter, which must not hang either
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
    member.control.report({"a": 2.0})
    member.control.leave(LeaveReason.DRAINED)
"""


def test_a_forked_child_is_refused_and_ends(tmp_path: Path) -> None:
    """In the child every method raises `ForkedProcess`; it exits normally; the parent goes on."""
    with coordinator(tmp_path) as running:
        done = subprocess.run(
            [sys.executable, "-c", FORKING, str(running.address)],
            cwd=ROOT, stdout=subprocess.PIPE, text=True, timeout=60, check=True,
        )  # fmt: skip
        assert done.stdout == "4\n"
        assert state_of(running, "parent") is MemberState.LEFT
        assert running.do(lambda state, now: state.numbers) == {"a": 2.0}


def test_a_process_may_fork_again_and_again(tmp_path: Path) -> None:
    """Children forked while a session is open, as DataLoaders do, neither hang nor disturb it."""
    with coordinator(tmp_path) as running, Member(running.address, Role.WORKER) as worker:
        for _ in range(20):
            if (child := os.fork()) == 0:
                try:
                    worker.control.report({"a": 1.0})
                except ForkedProcess:
                    os._exit(7)
                os._exit(8)
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
        worker.control.report({"a": 1.0})
        assert not worker.heard.lost


def test_a_listener_that_fails_does_not_end_the_session(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The mistake is logged; what could not be installed is not acknowledged; heartbeats go on."""

    class Clumsy(Heard):
        def on_job(self, state: JobState, reason: str, release: bool) -> None:
            super().on_job(state, reason, release)
            raise RuntimeError("clumsy")

    with coordinator(tmp_path) as running, Member(running.address, Role.WORKER, heard=Clumsy()) as worker:
        client.stop(running.address, interrupted=True, reason="x")
        worker.heard.wait_until(lambda heard: heard.job[0] is JobState.INTERRUPTED)
        worker.control.leave(LeaveReason.DRAINED)
    assert "the session's listener failed" in caplog.text


def test_nothing_is_left_after_close(tmp_path: Path) -> None:
    """Session, heartbeats and channel end; closing twice, or from within a listener, is fine."""

    class Closing(Heard):
        control: GrpcControl | None = None

        def on_job(self, state: JobState, reason: str, release: bool) -> None:
            if self.control is not None:
                self.control.close()
            super().on_job(state, reason, release)

    before = set(threading.enumerate())
    with coordinator(tmp_path) as running:
        heard = Closing()
        with Member(running.address, Role.WORKER, heard=heard) as worker:
            heard.control = worker.control
            client.stop(running.address, interrupted=True, reason="x")
            heard.wait_until(lambda heard: heard.job[0] is JobState.INTERRUPTED)
            worker.control.close()
    assert_eventually(lambda: set(threading.enumerate()) <= before, BOUND_S)
