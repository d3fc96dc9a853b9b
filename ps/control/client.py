"""The coordinator as members and launchers see it: `Control` over gRPC, and what operators may ask for."""

from __future__ import annotations

import itertools
import logging
import os
import socket
import sys
import threading
from collections.abc import Callable, Mapping
from typing import TypeVar

from ps import secrets
from ps.clock import Clock, MonotonicClock
from ps.consistency.policy import Ruling
from ps.control import convert
from ps.control.api import (
    DataRange,
    Joined,
    Lease,
    LeaseAsk,
    Proposal,
    SessionListener,
    ShardMap,
    StreamSpec,
)
from ps.control.failures import INCARNATION_KEY, SECRET_KEY
from ps.control.line import ATTEMPT_S, Future, Line, Metadata
from ps.control.session import Session
from ps.errors import CoordinatorLost, Fenced, PsError, Refused
from ps.sharding.spec import ModelSignature
from ps.types import Address, LeaveReason, Role
from ps.v1 import admin_pb2
from ps.v1 import coordinator_pb2 as pb

logger = logging.getLogger(__name__)

T = TypeVar("T")

LEAVE_S = 5.0
"""Bound on a goodbye: nobody should be kept from exiting by a coordinator that is gone."""

FLUSH_S = 1.0


class GrpcControl:
    """A member's line to the coordinator; see `ps.control.api.Control` for what each method promises.

    Thread-safe. Imports no torch. In a forked child every method raises `ForkedProcess`, and `close` does nothing.
    """

    def __init__(self, coordinator: Address, *, clock: Clock | None = None) -> None:
        self._address = coordinator
        self._clock = clock or MonotonicClock()
        self._line = Line(coordinator, self._clock)
        self._joined: Joined | None = None
        self._session: Session | None = None
        self._left = False
        self._requests = itertools.count(1)
        self._lock = threading.RLock()  # guards _map; reentrant, since a signal handler may come in between
        self._map: ShardMap | None = None

    def join(self, *, role: Role, name: str = "", timeout_s: float = 30.0) -> Joined:
        """See `Control.join`."""
        self._line.check_process()
        if self._joined is not None:
            raise Refused(f"this process has joined already, as incarnation {self._joined.incarnation}")
        torch_version, capability = _torch()
        request = pb.JoinRequest(
            role=convert.role_to_proto(role),
            name=name,
            host=socket.gethostname(),
            pid=os.getpid(),
            torch_version=torch_version,
            cpu_capability=capability,
            nonce=secrets.new_secret(),
        )
        reply = self._line.call(self._line.coordinator.Join.future, request, what="join", bound_s=timeout_s)
        self._joined = convert.joined_from_proto(reply)
        return self._joined

    def start_session(self, listener: SessionListener) -> None:
        """See `Control.start_session`."""
        self._line.check_process()
        if self._session is not None:
            raise Refused("the session runs already")
        self._session = Session(self._line, self._member(), self._metadata(), listener)
        self._session.start()

    def ready(self, address: str, *, timeout_s: float = 30.0) -> None:
        """See `Control.ready`."""
        request = pb.ReadyRequest(address=address)
        self._call("Ready", request, pb.ReadyReply, what="ready", bound_s=timeout_s)

    def take_part(self, part: bool, *, timeout_s: float = 30.0) -> None:
        """See `Control.take_part`."""
        request = pb.TakePartRequest(part=part)
        self._call("TakePart", request, pb.TakePartReply, what="take part", bound_s=timeout_s)

    def send_rulings(self, rulings: tuple[Ruling, ...]) -> None:
        """Tell all servers what a shard of this one has decided for them. Thread-safe, doesn't block."""
        if self._session is not None:
            self._session.send_rulings(rulings)

    def propose_model(self, signature: ModelSignature, *, wait_s: float = 2.0) -> Proposal:
        """See `Control.propose_model`."""
        request = pb.ProposeModelRequest(signature=convert.signature_to_proto(signature), wait_s=wait_s)
        reply = self._call("ProposeModel", request, pb.ProposeModelReply, what="propose model", held_s=wait_s)
        proposal = convert.proposal_from_proto(reply)
        self._keep(proposal.shard_map)
        return proposal

    def finish_init(self, *, timeout_s: float = 30.0) -> ShardMap:
        """See `Control.finish_init`."""
        reply = self._call(
            "FinishInit", pb.FinishInitRequest(), pb.FinishInitReply, what="finish init", bound_s=timeout_s
        )
        shard_map = convert.shard_map_from_proto(reply.shard_map)
        self._keep(shard_map)
        return shard_map

    def shard_map(self) -> ShardMap | None:
        """See `Control.shard_map`."""
        self._line.check_process()
        if self._session is not None:
            self._keep(self._session.shard_map)
        return self._map

    def open_stream(self, spec: StreamSpec) -> int:
        """See `Control.open_stream`."""
        request = convert.stream_to_proto(spec)
        return int(self._call("OpenStream", request, pb.OpenStreamReply, what="open stream").epoch)

    def lease(self, ask: LeaseAsk, *, wait_s: float = 2.0) -> Lease:
        """See `Control.lease`."""
        request = convert.ask_to_proto(ask, wait_s=wait_s, request=next(self._requests))
        reply = self._call("LeaseData", request, pb.LeaseDataReply, what="lease data", held_s=wait_s)
        return convert.lease_from_proto(reply)

    def ack(self, done: tuple[DataRange, ...], returned: tuple[DataRange, ...] = ()) -> None:
        """See `Control.ack`. Does nothing when both are empty."""
        if not done and not returned:
            return
        request = pb.AckDataRequest(
            done=[convert.range_to_proto(part) for part in done],
            returned=[convert.range_to_proto(part) for part in returned],
        )
        self._call("AckData", request, pb.AckDataReply, what="acknowledge data")

    def report(self, numbers: Mapping[str, float]) -> None:
        """See `Control.report`."""
        self._call("Report", pb.ReportRequest(numbers=numbers), pb.ReportReply, what="report")

    def leave(self, reason: LeaveReason, *, exit_code: int = 0, detail: str = "") -> None:
        """See `Control.leave`. The progress of the member goes ahead of it."""
        self._line.check_process()
        session = self._session
        if self._left or self._joined is None or (session is not None and isinstance(session.out, Fenced)):
            return
        if session is not None:
            session.flush(FLUSH_S)
            session.retire()
        request = pb.LeaveRequest(reason=convert.leave_reason_to_proto(reason), exit_code=exit_code, detail=detail)
        try:
            self._call("Leave", request, pb.LeaveReply, what="leave", bound_s=LEAVE_S)
        except Fenced:
            logger.info("left, but was evicted before")
        except CoordinatorLost:
            # After the end of the job the coordinator exits by itself, perhaps before this goodbye.
            if session is None or not session.job_over:
                raise
        self._left = True
        if session is not None:
            session.close()

    def close(self) -> None:
        """See `Control.close`."""
        if not self._line.mine:
            return
        if self._session is not None:
            self._session.close()
        self._line.close()

    def _call(
        self,
        method: str,
        request: object,
        reply: type[T],
        *,
        what: str,
        held_s: float = 0.0,
        bound_s: float | None = None,
    ) -> T:
        bound_s = self._member().settings.lost_coordinator_s + held_s if bound_s is None else bound_s
        future = getattr(self._line.coordinator, method).future
        answer = self._line.call(
            future, request, what=what, bound_s=bound_s, attempt_s=ATTEMPT_S + held_s, metadata=self._metadata(),
            give_up=self._why_out,
        )  # fmt: skip
        assert isinstance(answer, reply)
        return answer

    def _member(self) -> Joined:
        self._line.check_process()
        if self._joined is None:
            raise Refused("not a member yet; call join first")
        return self._joined

    def _metadata(self) -> Metadata:
        joined = self._member()
        return ((INCARNATION_KEY, str(joined.incarnation)), (SECRET_KEY, joined.secret))

    def _why_out(self) -> PsError | None:
        if self._left:
            return Refused("this member has left the job")
        return self._session.out if self._session is not None else None

    def _keep(self, shard_map: ShardMap | None) -> None:
        with self._lock:
            if shard_map is not None and (self._map is None or shard_map.epoch > self._map.epoch):
                self._map = shard_map


def status(address: Address, timeout_s: float = 5.0) -> pb.StatusReply:
    """State of the job at `address`. Raises `CoordinatorLost` when nobody answers in time."""
    reply = _once(address, lambda line: line.coordinator.Status.future, pb.StatusRequest(), "status", timeout_s)
    assert isinstance(reply, pb.StatusReply)
    return reply


def report_exit(address: Address, *, name: str, pid: int, exit_code: int, final: bool, timeout_s: float = 5.0) -> None:
    """Tell that a member's process is gone; `exit_code` as `os.waitstatus_to_exitcode` gives it, < 0 for a signal.

    `final`: no process will be started in its place.
    """
    request = admin_pb2.ReportExitRequest(name=name, pid=pid, exit_code=exit_code, final=final)
    _once(address, lambda line: line.admin.ReportExit.future, request, "report exit", timeout_s)


def stop(address: Address, *, interrupted: bool, reason: str, timeout_s: float = 5.0) -> None:
    """End the job for everybody, as interrupted or failed. A job that is over stays as it is."""
    request = admin_pb2.StopRequest(interrupted=interrupted, reason=reason)
    _once(address, lambda line: line.admin.Stop.future, request, "stop", timeout_s)


def release(address: Address, *, timeout_s: float = 5.0) -> None:
    """The results of a job that is over are saved: servers, observers and the coordinator exit. Raises `Refused`."""
    _once(address, lambda line: line.admin.Release.future, admin_pb2.ReleaseRequest(), "release", timeout_s)


def _once(
    address: Address, method: Callable[[Line], Callable[..., Future[T]]], request: object, what: str, timeout_s: float
) -> T:
    line = Line(address, MonotonicClock())
    try:
        return line.call(method(line), request, what=what, bound_s=timeout_s)
    finally:
        line.close()


def _torch() -> tuple[str, str]:
    """Version of torch and the CPU capability its kernels use, if this process has loaded it."""
    torch = sys.modules.get("torch")
    if torch is None:
        return "", ""
    return str(torch.__version__), str(torch.backends.cpu.get_cpu_capability())
