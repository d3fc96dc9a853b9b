"""A member's session: heartbeats up, news down, for as long as the member lives; reconnects by itself.

Two threads: `ps-session` opens the stream, hears the news and calls the listener; gRPC's request thread, named
`ps-heartbeat`, sends heartbeats and acknowledgements. Both end in `close`.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from typing import NamedTuple

import grpc

from ps.clock import Deadline
from ps.consistency.policy import Ruling
from ps.control import convert
from ps.control.api import Admitted, Joined, SessionListener, ShardMap
from ps.control.failures import RETRYABLE, error_of
from ps.control.line import Backoff, Line, Metadata
from ps.control.rulings import Rulings
from ps.errors import CoordinatorLost, Fenced, PsError
from ps.types import JobState
from ps.v1 import coordinator_pb2 as pb

logger = logging.getLogger(__name__)

JOIN_THREAD_S = 5.0
"""Bound on waiting for each thread in `close`."""


class _Installed(NamedTuple):
    """What a server's acknowledgement tells."""

    membership: int = 0
    map_epoch: int = 0
    entries: tuple[int, ...] = ()


class _Stream:
    """One attempt at a stream, and the thread that feeds it."""

    def __init__(self) -> None:
        self.over = threading.Event()
        self.poke = threading.Event()
        self.feeder: threading.Thread | None = None
        self.call: grpc.Call | None = None

    def end(self) -> None:
        """End it; idempotent. Not on the main thread, as it enters gRPC."""
        self.over.set()
        self.poke.set()
        if self.call is not None:
            self.call.cancel()  # type: ignore[no-untyped-call]


class Session:
    """Runs from `start` to `close`, or until the member is fenced, lost, or done with."""

    def __init__(self, line: Line, joined: Joined, metadata: Metadata, listener: SessionListener) -> None:
        self._line = line
        self._clock = line.clock
        self._settings = joined.settings
        self._metadata = metadata
        self._listener = listener
        self._closing = threading.Event()
        self._first = threading.Event()
        self._beat = threading.Event()
        self._echo = threading.Event()
        self._beats = self._echoes = 0  # of the stream that is open; written by its two threads
        self._generation = joined.generation
        self._heard_at = self._clock.now()
        # Written by the session thread, read by the heartbeat thread; the newest values are all that counts.
        self._installed = self._told = _Installed()
        self._rulings = Rulings()
        self._rulings_lock = threading.Lock()  # guards _rulings
        self._stream = _Stream()
        self._thread = threading.Thread(target=self._run, name="ps-session", daemon=True)
        self.shard_map: ShardMap | None = None
        """The newest map heard of; written by the session thread only."""
        self.out: PsError | None = None
        """Why this member can't go on: `Fenced` or `CoordinatorLost`."""
        self._released = self._retired = False
        self.job_over = False
        """The end of the job was announced: a coordinator that is gone is no loss."""

    def start(self) -> None:
        """Back once the coordinator has answered. Raises `CoordinatorLost` or `Fenced`."""
        self._thread.start()
        deadline = Deadline.after(self._clock, self._settings.lost_coordinator_s + 1.0)
        self._clock.wait(self._first, deadline.remaining_s(self._clock))
        if self.out is not None:
            raise self.out
        if not self._first.is_set():
            raise CoordinatorLost(f"the coordinator at {self._line.address} did not answer the session")

    def flush(self, timeout_s: float) -> bool:
        """Send a heartbeat with the newest progress now; True once the coordinator has it."""
        stream, goal = self._stream, self._beats + 1
        deadline = Deadline.after(self._clock, timeout_s)
        self._request_beat()
        while self._stream is stream and self._echoes < goal and not deadline.expired(self._clock):
            self._echo.clear()
            if self._echoes < goal:
                self._clock.wait(self._echo, deadline.remaining_s(self._clock))
        return self._echoes >= goal

    def send_rulings(self, rulings: tuple[Ruling, ...]) -> None:
        """Send these soon; thread-safe."""
        with self._rulings_lock:
            self._rulings.add(rulings)
        self._stream.poke.set()

    def retire(self) -> None:
        """The member is about to leave: the end of the stream is no news any more."""
        self._retired = True

    def close(self) -> None:
        """End the stream and both threads; idempotent, bounded. May be called from a listener."""
        self._closing.set()
        self._line.post(self._stream.end)
        for thread in (self._thread, self._stream.feeder):
            if thread is not None and thread is not threading.current_thread() and thread.ident is not None:
                thread.join(JOIN_THREAD_S)

    def _run(self) -> None:
        try:
            self._keep_open()
        finally:
            self._first.set()

    def _keep_open(self) -> None:
        backoff = Backoff()
        while not self._closing.is_set() and self.out is None:
            before = self._heard_at
            failure = self._one_stream()
            if self._closing.is_set() or self.out is not None:
                return
            if self._released or self._retired:
                return  # the coordinator exits by itself, or has been told goodbye
            if failure is not None and failure.code() not in RETRYABLE:
                self._fence(str(error_of(failure)))
                return
            if self._heard_at > before:
                backoff.reset()
                logger.info("session lost (%s); opening a new one", failure.details() if failure else "ended")
            if self._clock.now() - self._heard_at >= self._settings.lost_coordinator_s:
                self._lose(failure)
                return
            self._clock.wait(self._closing, backoff.next_s())

    def _one_stream(self) -> grpc.RpcError | None:
        """One stream from its opening to its end; why it ended."""
        self._stream = stream = _Stream()
        self._told = _Installed()
        self._beats = self._echoes = 0
        try:
            stream.call = call = self._line.coordinator.Session(self._feed(stream), metadata=self._metadata)
            if self._closing.is_set():
                stream.end()  # close() may have ended the stream before
            for down in call:
                self._hear(down)
                if self._closing.is_set() or self.out is not None:
                    break
        except grpc.RpcError as failure:
            return failure
        except ValueError as error:
            # The channel was closed under us.
            logger.debug("session: %s", error)
        finally:
            stream.end()
            if stream.feeder is not None:
                stream.feeder.join(JOIN_THREAD_S)
        return None

    def _hear(self, down: pb.SessionDown) -> None:
        if down.generation < self._generation:
            # An older coordinator still runs somewhere; it may not decide anything any more.
            logger.warning("coordinator of generation %d ignored, %d is known", down.generation, self._generation)
            self._stream.end()
            return
        self._generation = down.generation
        self._heard_at = self._clock.now()
        match down.WhichOneof("kind"):
            case "membership":
                version = down.membership.version
                admitted = convert.admitted_from_proto(down.membership)
                self._tell(lambda: self._install_members(version, admitted))
            case "rulings":
                rulings = convert.rulings_from_proto(down.rulings)
                self._tell(lambda: self._listener.on_rulings(rulings))
            case "shard_map":
                shard_map = convert.shard_map_from_proto(down.shard_map)
                self.shard_map = shard_map
                if self._tell(lambda: self._listener.on_shard_map(shard_map)):
                    self._install(self._installed._replace(map_epoch=shard_map.epoch))
            case "job":
                self._hear_job(down.job)
            case "drain":
                self._tell(lambda: self._listener.on_drain(down.drain.reason))
            case "fenced":
                self._fence(down.fenced.reason)
            case None:
                self._echoes += 1
                self._echo.set()
        self._first.set()

    def _hear_job(self, job: pb.JobUpdate) -> None:
        state: JobState = convert.job_state_from_proto(job.state)
        self._released = job.release
        if state.over:
            self.job_over = True
            self._request_beat()  # the summary is made of the last heartbeats
        self._tell(lambda: self._listener.on_job(state, job.reason, job.release))

    def _install_members(self, version: int, admitted: tuple[Admitted, ...]) -> None:
        entries = self._listener.on_membership(version, admitted)
        self._install(self._installed._replace(membership=version, entries=entries))

    def _install(self, installed: _Installed) -> None:
        self._installed = installed
        self._stream.poke.set()

    def _request_beat(self) -> None:
        self._beat.set()
        self._stream.poke.set()

    def _fence(self, reason: str) -> None:
        if self._retired:
            return
        self.out = Fenced(f"this incarnation is out of the job: {reason}; start a new process")
        self._tell(lambda: self._listener.on_fenced(reason))

    def _lose(self, failure: grpc.RpcError | None) -> None:
        bound_s = self._settings.lost_coordinator_s
        last = f" (last: {failure.details()})" if failure is not None else ""
        reason = f"no coordinator at {self._line.address} for {bound_s:g} s{last}"
        self.out = CoordinatorLost(reason)
        self._tell(lambda: self._listener.on_lost(reason))

    def _tell(self, news: Callable[[], None]) -> bool:
        """Call the listener; False, and a log line, when it raised: the session must outlive its mistakes."""
        try:
            news()
        except Exception:
            logger.exception("the session's listener failed")
            return False
        return True

    def _feed(self, stream: _Stream) -> Iterator[pb.SessionUp]:
        stream.feeder = threading.current_thread()
        stream.feeder.name = "ps-heartbeat"
        next_beat = self._clock.now()
        sent = 0
        while not stream.over.is_set():
            stream.poke.clear()
            if self._installed != self._told:
                self._told = told = self._installed
                ack = pb.Ack(membership_version=told.membership, map_epoch=told.map_epoch, entries=told.entries)
                yield pb.SessionUp(ack=ack)
            with self._rulings_lock:
                rulings, sent = self._rulings.since(sent), self._rulings.end
            if rulings:
                yield pb.SessionUp(rulings=convert.rulings_to_proto(rulings))
            if self._beat.is_set() or self._clock.now() >= next_beat:
                self._beat.clear()
                next_beat = self._clock.now() + self._settings.heartbeat_s
                yield pb.SessionUp(heartbeat=self._heartbeat())
            if self._clock.now() - self._heard_at > max(self._settings.lease_s, 3 * self._settings.heartbeat_s):
                # Connected, but nobody answers: another connection may find somebody.
                stream.end()
            self._clock.wait(stream.poke, next_beat - self._clock.now())

    def _heartbeat(self) -> pb.Heartbeat:
        # Counted before the progress is read: who waits for the next one gets newer numbers.
        self._beats += 1
        try:
            return convert.heartbeat_to_proto(self._listener.progress())
        except Exception:
            logger.exception("the session's listener failed")
            return pb.Heartbeat()
