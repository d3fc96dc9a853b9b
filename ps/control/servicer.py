"""gRPC methods of the coordinator: check who calls, hand over to the state, answer. No decisions."""

from __future__ import annotations

import asyncio
import logging
import math
import sqlite3
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import TypeAlias, TypeVar

import grpc
from google.protobuf.message import Message

from ps import secrets
from ps.control import convert, failures, report
from ps.control.api import Lease, LeaseVerdict, Proposal, Verdict
from ps.control.engine import Engine, wait_event
from ps.control.news import News, Seen
from ps.control.records import Topic
from ps.errors import Fenced, PsError, Refused, WireError
from ps.types import Incarnation, MemberState, Role
from ps.v1 import admin_pb2, admin_pb2_grpc, coordinator_pb2_grpc
from ps.v1 import coordinator_pb2 as pb

logger = logging.getLogger(__name__)

T = TypeVar("T")
Context: TypeAlias = "grpc.aio.ServicerContext[Message, Message]"

NOT_YET_S = 2.0
"""How long calls without a `wait_s` of their own are held before "not yet" is answered."""


class NotYet(PsError):
    """The answer is not there yet; the caller asks again."""


class CoordinatorServicer(coordinator_pb2_grpc.CoordinatorServicer):  # type: ignore[misc]  # generated, untyped
    """The members' service."""

    def __init__(self, engine: Engine, myself: Callable[[], pb.MemberStatus]) -> None:
        self._engine = engine
        self._myself = myself

    async def Join(self, request: pb.JoinRequest, context: Context) -> pb.JoinReply:
        """A process becomes a member."""
        secret = secrets.new_secret()
        joined = await answer(
            context,
            lambda: self._engine.do(
                lambda now: self._engine.state.join(
                    now,
                    role=convert.role_from_proto(request.role),
                    name=request.name,
                    host=request.host[:255],
                    pid=request.pid,
                    secret=secret,
                    nonce=request.nonce[:64],
                    runs=" ".join(filter(None, (request.torch_version[:64], request.cpu_capability[:64]))),
                )
            ),
        )
        return convert.joined_to_proto(joined)

    async def Ready(self, request: pb.ReadyRequest, context: Context) -> pb.ReadyReply:
        """Held until every live server knows the caller."""
        state = self._engine.state

        async def run() -> int:
            caller = self._caller(context)
            await self._engine.do(lambda now: state.ready(now, caller, request.address))
            version = await self._engine.poll(Topic.MEMBERS, lambda _: state.known(caller), NOT_YET_S)
            if version is None:
                raise NotYet("not every live server has acknowledged this member yet")
            return version

        return pb.ReadyReply(membership_version=await answer(context, run))

    async def TakePart(self, request: pb.TakePartRequest, context: Context) -> pb.TakePartReply:
        """With `part` held until every live server counts the caller."""
        state = self._engine.state

        async def run() -> None:
            caller = self._caller(context)
            await self._engine.do(lambda now: state.take_part(now, caller, request.part))
            if not request.part:
                return
            if await self._engine.poll(Topic.MEMBERS, lambda _: state.known(caller), NOT_YET_S) is None:
                raise NotYet("not every live server counts this worker yet")

        await answer(context, run)
        return pb.TakePartReply()

    async def Leave(self, request: pb.LeaveRequest, context: Context) -> pb.LeaveReply:
        """Goodbye."""

        async def run() -> None:
            caller = self._caller(context)
            reason = convert.leave_reason_from_proto(request.reason)
            code, detail = request.exit_code, request.detail[: failures.MAX_TEXT]
            await self._engine.do(
                lambda now: self._engine.state.leave(now, caller, reason, exit_code=code, detail=detail)
            )

        await answer(context, run)
        return pb.LeaveReply()

    async def ProposeModel(self, request: pb.ProposeModelRequest, context: Context) -> pb.ProposeModelReply:
        """Held for up to `wait_s` while undecided."""

        async def run() -> Proposal:
            caller, signature = self._caller(context), convert.signature_from_proto(request.signature)
            newest = Proposal(verdict=Verdict.WAIT, reason="", shard_map=None)

            def attempt(now: float) -> Proposal | None:
                nonlocal newest
                newest = self._engine.state.propose(now, caller, signature)
                return None if newest.verdict is Verdict.WAIT else newest

            return await self._engine.poll(Topic.MODEL, attempt, _wait_s(request.wait_s)) or newest

        return convert.proposal_to_proto(await answer(context, run))

    async def FinishInit(self, request: pb.FinishInitRequest, context: Context) -> pb.FinishInitReply:
        """Held until every holder has installed the map."""
        state = self._engine.state

        async def run() -> pb.FinishInitReply:
            caller = self._caller(context)
            await self._engine.do(lambda now: state.finish_init(now, caller))
            shard_map = await self._engine.poll(Topic.MODEL, lambda _: state.map_in_force(), NOT_YET_S)
            if shard_map is None:
                raise NotYet("not every server has acknowledged the shard map yet")
            return pb.FinishInitReply(shard_map=convert.shard_map_to_proto(shard_map))

        return await answer(context, run)

    async def OpenStream(self, request: pb.OpenStreamRequest, context: Context) -> pb.OpenStreamReply:
        """Open or re-open a data stream."""

        async def run() -> int:
            caller, spec = self._caller(context), convert.stream_from_proto(request)
            return await self._engine.do(lambda now: self._engine.state.open_stream(now, caller, spec))

        return pb.OpenStreamReply(epoch=await answer(context, run))

    async def LeaseData(self, request: pb.LeaseDataRequest, context: Context) -> pb.LeaseDataReply:
        """Held for up to `wait_s` while others hold ranges that may come back."""

        async def run() -> Lease:
            caller, ask = self._caller(context), convert.ask_from_proto(request)

            def attempt(now: float) -> Lease | None:
                lease = self._engine.state.lease(now, caller, ask, request.request)
                return None if lease.verdict is LeaseVerdict.WAIT else lease

            lease = await self._engine.poll(Topic.DATA, attempt, _wait_s(request.wait_s))
            return lease or Lease(verdict=LeaseVerdict.WAIT)

        return convert.lease_to_proto(await answer(context, run))

    async def AckData(self, request: pb.AckDataRequest, context: Context) -> pb.AckDataReply:
        """Samples that are done, and samples that others may have."""

        async def run() -> None:
            caller = self._caller(context)
            done = tuple(convert.range_from_proto(part) for part in request.done)
            returned = tuple(convert.range_from_proto(part) for part in request.returned)
            await self._engine.do(lambda now: self._engine.state.ack_data(now, caller, done, returned))

        await answer(context, run)
        return pb.AckDataReply()

    async def Report(self, request: pb.ReportRequest, context: Context) -> pb.ReportReply:
        """Numbers for status and summary."""

        async def run() -> None:
            caller = self._caller(context)
            await self._engine.do(lambda now: self._engine.state.report(now, caller, dict(request.numbers)))

        await answer(context, run)
        return pb.ReportReply()

    async def Status(self, request: pb.StatusRequest, context: Context) -> pb.StatusReply:
        """For anybody who asks."""
        reply = report.status(self._engine.state, self._engine.now())
        reply.members.insert(0, self._myself())
        return reply

    async def Session(self, ups: AsyncIterator[pb.SessionUp], context: Context) -> None:
        """Heartbeats up, news down, until the member ends or the stream breaks."""

        async def run() -> None:
            caller = self._caller(context)
            token = await self._engine.do(lambda now: self._engine.state.open_session(now, caller))
            session = _Session(self._engine, caller, token, context)
            try:
                await session.run(ups)
            finally:
                await self._engine.do(lambda now: self._engine.state.close_session(now, caller, token))

        await answer(context, run)

    def _caller(self, context: Context) -> Incarnation:
        """Who calls, by metadata; raises `Refused` for a wrong secret."""
        metadata = dict(context.invocation_metadata() or ())
        number, secret = metadata.get(failures.INCARNATION_KEY, ""), metadata.get(failures.SECRET_KEY, b"")
        if not str(number).isdigit() or not isinstance(secret, bytes):
            raise WireError(f"call without {failures.INCARNATION_KEY} and {failures.SECRET_KEY}; join first")
        incarnation = Incarnation(int(number))
        member = self._engine.state.members.find(incarnation)
        if member is None:
            raise Fenced(f"incarnation {incarnation} is not a member of this job; start a new process")
        if not secrets.matches(secret, member.secret):
            raise Refused(f"wrong secret for incarnation {incarnation}")
        return incarnation


class _Session:
    """One open Session stream."""

    def __init__(self, engine: Engine, caller: Incarnation, token: int, context: Context) -> None:
        self._engine = engine
        self._caller = caller
        self._token = token
        self._context = context
        self._poke = asyncio.Event()
        self._echoes = 0

    async def run(self, ups: AsyncIterator[pb.SessionUp]) -> None:
        """Until the member is out or its stream ends. Raises `Fenced`."""
        self._engine.pokes[self._token] = self._poke
        reader = asyncio.create_task(self._read(ups))
        try:
            await self._write(reader)
        finally:
            del self._engine.pokes[self._token]
            reader.cancel()
            await asyncio.gather(reader, return_exceptions=True)

    async def _read(self, ups: AsyncIterator[pb.SessionUp]) -> None:
        state = self._engine.state
        try:
            async for up in ups:
                if up.HasField("ack"):
                    ack = up.ack
                    await self._engine.do(
                        lambda now, ack=ack: state.installed(  # type: ignore[misc]  # mypy can't infer the default's type
                            now,
                            self._caller,
                            membership=ack.membership_version,
                            map_epoch=ack.map_epoch,
                            entries=tuple(ack.entries),
                        )
                    )
                elif up.HasField("rulings"):
                    rulings = convert.rulings_from_proto(up.rulings)
                    await self._engine.do(
                        lambda now, rulings=rulings: state.rule(now, self._caller, rulings)  # type: ignore[misc]
                    )
                else:
                    progress = convert.heartbeat_from_proto(up.heartbeat)
                    await self._engine.do(
                        lambda now, progress=progress: state.heartbeat(now, self._caller, progress)  # type: ignore[misc]
                    )
                    self._echoes += 1
                    self._poke.set()
        finally:
            self._poke.set()

    async def _write(self, reader: asyncio.Task[None]) -> None:
        state, seen = self._engine.state, Seen()
        while not reader.done():
            self._poke.clear()
            news = state.news(self._caller, seen)
            await self._engine.committed()
            for message in _messages(news, state.generation):
                await self._context.write(message)
            if news.fenced is not None:
                return
            seen = news.seen
            while self._echoes:
                self._echoes -= 1
                await self._context.write(pb.SessionDown(generation=state.generation))
            await wait_event(self._poke, state.options.settings.heartbeat_s)
        reader.result()


def _messages(news: News, generation: int) -> list[pb.SessionDown]:
    messages = []
    if news.membership is not None:
        membership = convert.membership_to_proto(*news.membership)
        messages.append(pb.SessionDown(generation=generation, membership=membership))
    if news.rulings:
        messages.append(pb.SessionDown(generation=generation, rulings=convert.rulings_to_proto(news.rulings)))
    if news.shard_map is not None:
        messages.append(pb.SessionDown(generation=generation, shard_map=convert.shard_map_to_proto(news.shard_map)))
    if news.job is not None:
        job = pb.JobUpdate(
            state=convert.job_state_to_proto(news.job.state), reason=news.job.reason, release=news.job.released
        )
        messages.append(pb.SessionDown(generation=generation, job=job))
    if news.fenced is not None:
        messages.append(pb.SessionDown(generation=generation, fenced=pb.Fenced(reason=news.fenced)))
    return messages


class AdminServicer(admin_pb2_grpc.AdminServicer):  # type: ignore[misc]  # generated, untyped
    """The operators' and launchers' service."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    async def ReportExit(self, request: admin_pb2.ReportExitRequest, context: Context) -> admin_pb2.ReportExitReply:
        """A member's process is gone."""

        def event(now: float) -> None:
            self._engine.state.report_exit(
                now, name=request.name, pid=request.pid, exit_code=request.exit_code, final=request.final
            )

        await answer(context, lambda: self._engine.do(event))
        return admin_pb2.ReportExitReply()

    async def Stop(self, request: admin_pb2.StopRequest, context: Context) -> admin_pb2.StopReply:
        """End the job for everybody."""
        reason = request.reason[: failures.MAX_TEXT]
        await answer(
            context,
            lambda: self._engine.do(
                lambda now: self._engine.state.stop(now, interrupted=request.interrupted, reason=reason)
            ),
        )
        return admin_pb2.StopReply()

    async def Release(self, request: admin_pb2.ReleaseRequest, context: Context) -> admin_pb2.ReleaseReply:
        """Results are saved."""
        await answer(context, lambda: self._engine.do(self._engine.state.release))
        return admin_pb2.ReleaseReply()


async def answer(context: Context, run: Callable[[], Awaitable[T]]) -> T:
    """Await a call's work; errors become its status, mapped in `failures`."""
    try:
        return await run()
    except NotYet as error:
        await context.abort(grpc.StatusCode.ABORTED, str(error))
    except PsError as error:
        code, text, trailing = failures.status_of(error)
        await context.abort(code, text, trailing)
    except sqlite3.Error as error:
        logger.error("the state file can't be written: %s; members will ask again", error)
        await context.abort(grpc.StatusCode.UNAVAILABLE, f"the coordinator's state file can't be written: {error}")
    raise AssertionError("abort returned")


def self_status(*, name: str, pid: int, host: str, address: str) -> pb.MemberStatus:
    """The coordinator's own entry in `Status`."""
    return pb.MemberStatus(
        role=convert.role_to_proto(Role.COORDINATOR),
        name=name,
        pid=pid,
        host=host,
        address=address,
        state=convert.member_state_to_proto(MemberState.LIVE),
    )


def _wait_s(wait_s: float) -> float:
    return wait_s if math.isfinite(wait_s) and wait_s > 0 else 0.0
