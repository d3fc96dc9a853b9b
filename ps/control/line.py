"""One gRPC channel to the coordinator: deadlines on every call, retries, and statuses turned into exceptions.

What may be retried is in `failures.RETRYABLE`; everything else is an answer and ends the call. Waits are event waits,
so that signal handlers run on the main thread meanwhile.
"""

from __future__ import annotations

import logging
import os
import queue
import random
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Generic, Protocol, TypeVar

import grpc

from ps.clock import Clock, Deadline
from ps.control.failures import RETRYABLE, error_of
from ps.errors import CoordinatorLost, ForkedProcess, PsError, Refused
from ps.types import Address
from ps.v1 import admin_pb2_grpc, coordinator_pb2_grpc

logger = logging.getLogger(__name__)

T = TypeVar("T")
R_co = TypeVar("R_co", covariant=True)

ATTEMPT_S = 5.0
"""Deadline of one attempt of a call that is answered at once; calls that are held get as much on top."""

CLOSE_S = 5.0
"""Bound on closing the channel."""

FIRST_BACKOFF_S = 0.05
LAST_BACKOFF_S = 1.0

MAX_MESSAGE_BYTES = 64 << 20
"""Bound on any control message, both ways; a model of half a million parameters fits."""

Metadata = Sequence[tuple[str, str | bytes]]


class Future(Protocol[R_co]):
    """The part of gRPC's call object that is used here."""

    def add_done_callback(self, fn: Callable[[object], None]) -> None:
        """Call `fn` once done, at once if it is."""
        ...

    def result(self, timeout: float | None = None) -> R_co:
        """The reply; raises the failure."""
        ...

    def code(self) -> grpc.StatusCode:
        """How it ended."""
        ...

    def cancel(self) -> bool:
        """Give the call up."""
        ...


class _Attempt(Generic[T]):
    """One try of a call. gRPC's part runs on other threads than the caller's, who only waits for `done`."""

    def __init__(self, start: Callable[[], Future[T]]) -> None:
        self._start = start
        self._future: Future[T] | None = None
        self.done = threading.Event()
        self.reply: T | None = None
        self.failure: grpc.RpcError | None = None

    def begin(self) -> None:
        """Send it."""
        try:
            self._future = self._start()
        except grpc.RpcError as error:  # it could not even be encoded
            self.failure = error
            self.done.set()
        except BaseException:
            self.done.set()
            raise
        else:
            self._future.add_done_callback(lambda _: self._finish())

    def cancel(self) -> None:
        """Give it up; follows `begin` on the same thread."""
        if self._future is not None:
            self._future.cancel()

    def _finish(self) -> None:
        assert self._future is not None
        try:
            if self._future.code() is grpc.StatusCode.OK:
                self.reply = self._future.result()
            else:
                assert isinstance(self._future, grpc.RpcError)  # gRPC's calls are their own failures
                self.failure = self._future
        finally:
            self.done.set()


class Backoff:
    """Exponential, with full jitter over the upper half: many members must not come back in step."""

    def __init__(self, first_s: float = FIRST_BACKOFF_S, last_s: float = LAST_BACKOFF_S) -> None:
        self._first_s = self._next_s = first_s
        self._last_s = last_s

    def next_s(self) -> float:
        """How long to wait before the next attempt."""
        wait_s = self._next_s * random.uniform(0.5, 1.0)  # no secret
        self._next_s = min(self._last_s, self._next_s * 2)
        return wait_s

    def reset(self) -> None:
        """After a success."""
        self._next_s = self._first_s


class Line:
    """A channel and its stubs. Thread-safe. Useless, by `ForkedProcess`, in a forked child.

    gRPC is only ever entered on the thread `ps-calls`, never on the caller's: an exception that a signal handler raises
    on the main thread inside of gRPC leaves a call that nobody finishes, and closing the channel waits for it for ever
    (seen in 4 of 10 tries).
    """

    def __init__(self, address: Address, clock: Clock) -> None:
        self.address = address
        self.clock = clock
        self._pid = os.getpid()
        self._closing = threading.Event()
        self._channel = grpc.insecure_channel(str(address), options=_OPTIONS)
        self.coordinator = coordinator_pb2_grpc.CoordinatorStub(self._channel)
        self.admin = admin_pb2_grpc.AdminStub(self._channel)
        # At most two items per calling thread. None ends the thread. SimpleQueue, since its put may be interrupted.
        self._work: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="ps-calls", daemon=True)
        self._thread.start()

    @property
    def mine(self) -> bool:
        """False in a forked child."""
        return os.getpid() == self._pid

    def check_process(self) -> None:
        """Raise `ForkedProcess` in a forked child: gRPC's threads and sockets did not come along."""
        if not self.mine:
            raise ForkedProcess(
                f"the line to the coordinator was opened by process {self._pid} and can't be used in its forked child "
                f"{os.getpid()}; use the worker in the main process only, or start processes with 'spawn'"
            )

    def call(
        self,
        method: Callable[..., Future[T]],
        request: object,
        *,
        what: str,
        bound_s: float,
        attempt_s: float = ATTEMPT_S,
        metadata: Metadata = (),
        give_up: Callable[[], PsError | None] = lambda: None,
    ) -> T:
        """Call until there is an answer, for at most `bound_s`.

        `method` is a stub's `.future`; `give_up` is asked before each attempt whether to end, and with what. Raises
        what the coordinator answered, or `CoordinatorLost`.
        """
        self.check_process()
        deadline, backoff, last = Deadline.after(self.clock, bound_s), Backoff(), "no attempt was made"
        while True:
            if (error := give_up()) is not None:
                raise error
            if self._closing.is_set():
                raise Refused(f"{what}: the line to the coordinator is closed")
            timeout_s = max(0.001, min(attempt_s, deadline.remaining_s(self.clock)))
            attempt = _Attempt(partial(method, request, timeout=timeout_s, metadata=metadata))
            self._wait(attempt, timeout_s)
            if attempt.reply is not None:
                return attempt.reply
            failure = attempt.failure
            if failure is not None and failure.code() not in RETRYABLE:
                raise error_of(failure) from None
            last = f"{failure.code().name}: {failure.details()}" if failure is not None else "cut off"
            left_s = deadline.remaining_s(self.clock)
            if left_s <= 0:
                break
            self.clock.wait(self._closing, min(left_s, backoff.next_s()))
        raise CoordinatorLost(
            f"{what}: the coordinator at {self.address} gave no answer for {bound_s:g} s (last: {last}); check the "
            "address, that `psctl coordinator` runs there, and firewalls in between"
        )

    def post(self, work: Callable[[], object]) -> None:
        """Run something that enters gRPC on the right thread, soon."""
        self._work.put(work)

    def close(self) -> None:
        """Close the channel; calls in flight end with an error. Idempotent, bounded; nothing in a forked child."""
        if not self.mine:
            return
        self._closing.set()
        self._work.put(None)
        if threading.current_thread() is not self._thread:
            self._thread.join(CLOSE_S)

    def _wait(self, attempt: _Attempt[T], timeout_s: float) -> None:
        """Back when the attempt is over. Signal handlers run meanwhile; what they raise cancels it."""
        self.post(attempt.begin)
        try:
            # gRPC ends the call by its own deadline; the wait is bounded all the same.
            deadline = Deadline.after(self.clock, timeout_s + ATTEMPT_S)
            while not self.clock.wait(attempt.done, min(0.5, deadline.remaining_s(self.clock))):
                if deadline.expired(self.clock) or not self._thread.is_alive():
                    self.post(attempt.cancel)
                    return
        except BaseException:
            self.post(attempt.cancel)
            raise

    def _run(self) -> None:
        while (work := self._work.get()) is not None:
            try:
                work()
            except Exception:
                logger.exception("the line to the coordinator: a call could not be started")
        self._channel.close()


_OPTIONS: list[tuple[str, int]] = [
    ("grpc.enable_http_proxy", 0),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    # A dead link is noticed within 10 s; the coordinator allows a ping per second.
    ("grpc.keepalive_time_ms", 5000),
    ("grpc.keepalive_timeout_ms", 5000),
    ("grpc.http2.ping_timeout_ms", 5000),  # see ps.control.server
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    # By default gRPC waits up to 2 minutes before it dials again, and 20 s for a connection.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 3000),
    ("grpc.max_reconnect_backoff_ms", 1000),
    # Its own connection: nobody else in this process can hold up or close it.
    ("grpc.use_local_subchannel_pool", 1),
]
