"""The coordinator over real gRPC: a whole job, its end, who may call, and what is served beside."""

from __future__ import annotations

import json
import threading
from contextlib import ExitStack
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from ps.clock import MonotonicClock
from ps.config import CoordinatorConfig
from ps.control import client
from ps.control.api import DataRange, LeaseVerdict, ServerProgress, ShardProgress, Verdict, WorkerProgress
from ps.control.client import GrpcControl
from ps.control.failures import INCARNATION_KEY, SECRET_KEY
from ps.control.line import Line
from ps.errors import (
    AddressError,
    ConfigError,
    CoordinatorLost,
    Fenced,
    JobFailed,
    ModelMismatch,
    Refused,
    WireError,
)
from ps.sharding.spec import ModelSignature
from ps.types import Address, JobState, LeaveReason, Role, ShardId
from ps.v1 import coordinator_pb2 as pb
from tests.support.control import MODEL, ask, stream
from tests.support.coordinator import BOUND_S, Heard, Member, RunningCoordinator, coordinator


def test_a_whole_job(tmp_path: Path) -> None:
    """Join, initialise, work off the data in two epochs, leave; summary, address file and exit code are right."""
    shard = ShardProgress(shard=ShardId(0), epoch=1, version=40, pushes=40, pulls=44)
    numbers = ServerProgress(shards=(shard,), bytes_pushed=4000, bytes_pulled=4400, staleness={0: 30, 1: 10})
    with coordinator(tmp_path) as running, ExitStack() as stack:
        address = Address.parse((tmp_path / "address").read_text())
        assert address == running.address
        server = stack.enter_context(Member(address, Role.SERVER, heard=Heard(ServerProgress()))).ready()
        workers = [stack.enter_context(Member(address, Role.WORKER)).ready() for _ in range(2)]
        assert [a.incarnation for a in server.heard.admitted] == [w.joined.incarnation for w in workers]

        proposal = workers[0].control.propose_model(MODEL)
        assert proposal.verdict is Verdict.INITIALISE
        assert workers[1].control.propose_model(MODEL, wait_s=0.0).verdict is Verdict.WAIT
        shard_map = workers[0].control.finish_init()
        assert server.heard.map == shard_map
        assert workers[1].control.propose_model(MODEL).verdict is Verdict.READY
        assert workers[1].control.shard_map() == shard_map

        seen: list[tuple[int, int]] = []
        for worker in workers:
            assert worker.control.open_stream(stream(epochs=2)) == 0
        for epoch in range(2):
            for worker in workers:
                seen += work_off(worker, epoch)
        assert sorted(seen) == [(epoch, i) for epoch in range(2) for i in range(100)]

        server.heard.told = numbers
        workers[1].control.report({"accuracy": 0.98})
        for worker in workers:
            worker.control.leave(LeaveReason.DONE)
        server.heard.wait_until(lambda heard: heard.job[2])
        assert server.heard.job[0] is JobState.FINISHED
        server.control.leave(LeaveReason.DONE)
        assert running.wait() == 0
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert (summary["outcome"], summary["samples"], summary["workers_seen"]) == ("finished", 200, 2)
    assert (summary["pushes"], summary["pulls"], summary["bytes_pushed"]) == (40, 44, 4000)
    assert summary["staleness"] == {"mean": 0.25, "max": 1, "histogram": {"0": 30, "1": 10}}
    assert summary["final"] == {"accuracy": 0.98}


def work_off(worker: Member, epoch: int) -> list[tuple[int, int]]:
    """Lease and acknowledge until the epoch ends; (epoch, position) of each sample."""
    seen = []
    while (lease := worker.control.lease(ask(epoch=epoch))).range is not None:
        seen += [(lease.range.epoch, i) for i in range(lease.range.begin, lease.range.end)]
        worker.control.ack((lease.range,))
    return seen


def test_waiting_for_the_last_range_ends_when_it_is_acknowledged(tmp_path: Path) -> None:
    """A held lease call is answered by the event, not by its time: 60 s are asked for."""
    with coordinator(tmp_path) as running, Member(running.address, Role.WORKER) as first:
        with Member(running.address, Role.WORKER) as second:
            for worker in (first, second):
                worker.control.open_stream(stream(length=10))
            lease = first.control.lease(ask())
            assert lease.range is not None
            answers = []
            waiting = threading.Thread(target=lambda: answers.append(second.control.lease(ask(), wait_s=60.0)))
            waiting.start()
            first.control.ack((lease.range,))
            waiting.join(BOUND_S)
            assert [answer.verdict for answer in answers] == [LeaseVerdict.STREAM_END]


def test_returned_ranges_wake_those_who_wait(tmp_path: Path) -> None:
    """A worker that drains hands its range back; who waited for it gets it at once."""
    with coordinator(tmp_path) as running, Member(running.address, Role.WORKER) as first:
        with Member(running.address, Role.WORKER) as second:
            for worker in (first, second):
                worker.control.open_stream(stream(length=10))
            lease = first.control.lease(ask())
            assert lease.range is not None
            answers = []
            waiting = threading.Thread(target=lambda: answers.append(second.control.lease(ask(), wait_s=60.0)))
            waiting.start()
            half = DataRange(stream=0, epoch=0, begin=5, end=10)
            first.control.ack((DataRange(stream=0, epoch=0, begin=0, end=5),), (half,))
            waiting.join(BOUND_S)
            assert [answer.range for answer in answers] == [half]


def test_a_different_model_is_refused_across_the_wire(tmp_path: Path) -> None:
    """The second worker gets `ModelMismatch` with the first difference, not a gRPC error."""
    with coordinator(tmp_path) as running, Member(running.address, Role.SERVER) as server:
        server.ready()
        with Member(running.address, Role.WORKER) as worker:
            worker.ready().control.propose_model(MODEL)
            other = ModelSignature(params=MODEL.params[:1], optimizer="SGD")
            with pytest.raises(ModelMismatch, match="'bias'"):
                worker.control.propose_model(other)


def test_a_failing_script_stops_the_others(tmp_path: Path) -> None:
    """The second worker hears of it on its session and in its next call; the coordinator exits with 1."""
    with coordinator(tmp_path) as running, Member(running.address, Role.WORKER) as first:
        with Member(running.address, Role.WORKER) as second:
            second.control.open_stream(stream())
            first.control.leave(LeaveReason.FAILED, exit_code=3, detail="ValueError: bad shape")
            second.heard.wait_until(lambda heard: heard.job[0] is JobState.FAILED)
            assert "ValueError: bad shape" in second.heard.job[1]
            with pytest.raises(JobFailed, match="ValueError: bad shape"):
                second.control.lease(ask())
            assert client.status(running.address).exit_code == 3
            second.control.leave(LeaveReason.DRAINED)
            assert running.wait() == 1
    assert json.loads((tmp_path / "summary.json").read_text())["outcome"] == "failed"


def test_hold_and_release(tmp_path: Path) -> None:
    """A held job stays up after its end, for an observer that saves the model, until it is released."""
    with coordinator(tmp_path, hold=True) as running:
        with Member(running.address, Role.SERVER) as server, Member(running.address, Role.WORKER) as worker:
            server.ready()
            with pytest.raises(Refused, match="release comes after"):
                client.release(running.address)
            worker.ready().control.leave(LeaveReason.DONE)
            server.heard.wait_until(lambda heard: heard.job[0] is JobState.FINISHED)
            assert not server.heard.job[2]
            with Member(running.address, Role.OBSERVER) as observer:
                observer.ready()
                assert [a.role for a in server.heard.admitted] == [Role.OBSERVER]
                observer.control.leave(LeaveReason.DONE)
            client.release(running.address)
            server.heard.wait_until(lambda heard: heard.job[2])
            server.control.leave(LeaveReason.DONE)
        assert running.wait() == 0


def test_a_reported_exit_evicts_at_once(tmp_path: Path) -> None:
    """The launcher knows that a process is gone: its range is free again long before its lease would end."""
    with coordinator(tmp_path, lease_s=1000.0) as running:
        with Member(running.address, Role.WORKER) as first, Member(running.address, Role.WORKER, "killed") as second:
            for worker in (first, second):
                worker.control.open_stream(stream(length=10))
            taken = second.control.lease(ask())
            pid = next(m.pid for m in client.status(running.address).members if m.name == "killed")
            client.report_exit(running.address, name="killed", pid=pid, exit_code=-9, final=True)
            second.heard.wait_until(lambda heard: "signal 9" in heard.fenced)
            assert first.control.lease(ask(), wait_s=60.0) == taken
            with pytest.raises(Fenced):
                second.control.lease(ask())


def test_stop_interrupts_everybody(tmp_path: Path) -> None:
    """An operator ends the job: members hear why, the exit code is that of an interrupt."""
    with coordinator(tmp_path) as running, Member(running.address, Role.WORKER) as worker:
        client.stop(running.address, interrupted=True, reason="enough")
        worker.heard.wait_until(lambda heard: heard.job == (JobState.INTERRUPTED, "enough", True))
        worker.control.leave(LeaveReason.DRAINED)
        assert running.wait() == 130


def test_status_shows_everybody(tmp_path: Path) -> None:
    """The coordinator is listed as well; progress of a worker arrives with its heartbeats."""
    with coordinator(tmp_path) as running:
        heard = Heard(WorkerProgress(steps=3, samples=30))
        with Member(running.address, Role.SERVER) as server, Member(running.address, Role.WORKER, "w", heard) as worker:
            server.ready()
            worker.ready()
            members = client.status(running.address).members
            assert [(m.name, m.incarnation) for m in members] == [("coordinator", 0), ("server-0", 1), ("w", 2)]
            assert members[0].address == str(running.address)
            worker.control.leave(LeaveReason.DRAINED)  # sends the newest progress ahead
            left = client.status(running.address).members[2]
            assert (left.steps, left.samples, left.reason) == (3, 30, "drained")


def test_calls_without_the_right_secret_are_refused(tmp_path: Path) -> None:
    """No metadata, a wrong secret, an unknown incarnation: each refused, by name, without a retry."""
    with coordinator(tmp_path) as running, Member(running.address, Role.WORKER) as worker:
        line = Line(running.address, MonotonicClock())
        number = str(worker.joined.incarnation)
        try:
            for metadata, error in (
                ((), WireError),
                (((INCARNATION_KEY, number), (SECRET_KEY, b"x" * 16)), Refused),
                (((INCARNATION_KEY, number), (SECRET_KEY, b"")), Refused),
                (((INCARNATION_KEY, "77"), (SECRET_KEY, b"x" * 16)), Fenced),
                (((INCARNATION_KEY, "no"), (SECRET_KEY, b"x" * 16)), WireError),
            ):
                with pytest.raises(error):
                    line.call(
                        line.coordinator.Report.future, pb.ReportRequest(), what="t", bound_s=5.0, metadata=metadata
                    )
        finally:
            line.close()


def test_health_and_reflection(tmp_path: Path) -> None:
    """Probes and grpcurl work without our files."""
    with coordinator(tmp_path) as running:
        options = [("grpc.enable_http_proxy", 0)]
        with grpc.insecure_channel(str(running.address), options=options) as channel:
            health = health_pb2_grpc.HealthStub(channel)
            for service in ("", "ps.v1.Coordinator", "ps.v1.Admin"):
                reply = health.Check(health_pb2.HealthCheckRequest(service=service), timeout=5.0)
                assert reply.status == health_pb2.HealthCheckResponse.SERVING
            listing = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo(
                iter([reflection_pb2.ServerReflectionRequest(list_services="")]), timeout=5.0
            )
            names = {service.name for service in next(listing).list_services_response.service}
            assert {"ps.v1.Coordinator", "ps.v1.Admin", "grpc.health.v1.Health"} <= names


def test_many_sessions_do_not_starve_calls(tmp_path: Path) -> None:
    """With 60 open sessions a join and a lease are answered as ever (a pool of threads would be used up)."""
    with coordinator(tmp_path, heartbeat_s=1.0) as running, ExitStack() as stack:
        members = [stack.enter_context(Member(running.address, Role.WORKER)) for _ in range(60)]
        members[0].control.open_stream(stream())
        assert members[0].control.lease(ask()).verdict is LeaseVerdict.RANGE


def test_a_taken_port_is_named(tmp_path: Path) -> None:
    """Two coordinators on one port: the second says which port, and what to do; its state file is free again."""
    with coordinator(tmp_path) as running:
        config = CoordinatorConfig(state=tmp_path / "other.db", port=running.address.port)
        with pytest.raises(AddressError, match=rf"port {running.address.port} on 127\.0\.0\.1: Address already in use"):
            RunningCoordinator(config)
        with pytest.raises(ConfigError, match="in use by another coordinator"):
            RunningCoordinator(CoordinatorConfig(state=tmp_path / "state.db"))


def test_nobody_there(tmp_path: Path) -> None:
    """A wrong address ends within the bound, with an error that names it and how long was tried."""
    with coordinator(tmp_path) as running:
        address = running.address
    control = GrpcControl(address)
    try:
        with pytest.raises(CoordinatorLost, match=f"coordinator at {address} gave no answer for 0.3 s"):
            control.join(role=Role.WORKER, timeout_s=0.3)
    finally:
        control.close()


def test_a_join_waits_for_a_coordinator_that_comes_later(tmp_path: Path) -> None:
    """Start order does not matter."""
    with coordinator(tmp_path) as running:
        address = running.address
    control, answers = GrpcControl(address), []
    joining = threading.Thread(target=lambda: answers.append(control.join(role=Role.WORKER, timeout_s=BOUND_S)))
    joining.start()
    with coordinator(tmp_path, port=address.port):
        joining.join(BOUND_S)
        control.close()
    assert len(answers) == 1


def test_proxies_are_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With every proxy variable set to a dead address everything works."""
    for name in ("http_proxy", "https_proxy", "grpc_proxy", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
        monkeypatch.setenv(name.upper(), "http://127.0.0.1:1")
    monkeypatch.delenv("no_proxy", raising=False)
    with coordinator(tmp_path) as running, Member(running.address, Role.WORKER) as worker:
        worker.ready()
