"""One gRPC channel to the coordinator: deadlines on every call, retries, and statuses turned into exceptions.

What may be retried is in `failures.RETRYABLE`; everything else is an answer and ends the call. Waits are event waits,
so that signal handlers run on the main thread meanwhile.
"""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

import grpc

from ps.clock import Clock, Deadline
from ps.control.failures import RETRYABLE, error_of
from ps.errors import CoordinatorLost, ForkedProcess, PsError, Refused
from ps.types import Address
from ps.v1 import admin_pb2_grpc, coordinator_pb2_grpc

T = TypeVar("T")
R_co = TypeVar("R_co", covariant=True)

ATTEMPT_S = 5.0
"""Deadline of one attempt of a call that is answered at once; calls that are held get as much on top."""

FIRST_BACKOFF_S = 0.05
LAST_BACKOFF_S = 1.0

MAX_MESSAGE_BYTES = 64 << 20

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
    """A channel and its stubs. Thread-safe. Useless, by `ForkedProcess`, in a forked child."""

    def __init__(self, address: Address, clock: Clock) -> None:
        self.address = address
        self.clock = clock
        self._pid = os.getpid()
        self._closing = threading.Event()
        self._channel = grpc.insecure_channel(str(address), options=_OPTIONS)
        self.coordinator = coordinator_pb2_grpc.CoordinatorStub(self._channel)
        self.admin = admin_pb2_grpc.AdminStub(self._channel)

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
            future = method(request, timeout=timeout_s, metadata=metadata)
            failure = self._outcome(future, attempt_s)
            if failure is None:
                return future.result()
            if failure.code() not in RETRYABLE:
                raise error_of(failure) from None
            last = f"{failure.code().name}: {failure.details()}"
            left_s = deadline.remaining_s(self.clock)
            if left_s <= 0:
                break
            self.clock.wait(self._closing, min(left_s, backoff.next_s()))
        raise CoordinatorLost(
            f"{what}: the coordinator at {self.address} gave no answer for {bound_s:g} s (last: {last}); check the "
            "address, that `psctl coordinator` runs there, and firewalls in between"
        )

    def close(self) -> None:
        """Close the channel; calls in flight end with an error. Idempotent; does nothing in a forked child."""
        self._closing.set()
        if self.mine:
            self._channel.close()

    def _outcome(self, future: Future[T], attempt_s: float) -> grpc.RpcError | None:
        """Wait until a call is over; its failure, None for success."""
        done = threading.Event()
        future.add_done_callback(lambda _: done.set())
        try:
            # gRPC ends the call by its own deadline; the wait is bounded all the same.
            if not self.clock.wait(done, attempt_s + ATTEMPT_S):
                future.cancel()
        except BaseException:
            future.cancel()
            raise
        if future.code() is grpc.StatusCode.OK:
            return None
        assert isinstance(future, grpc.RpcError)  # gRPC's calls are their own failures
        return future


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
