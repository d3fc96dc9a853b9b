"""The line to the coordinator for the ranks of one worker: rank 0's, whose answers all ranks get."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from ps.control.api import (
    Control,
    DataRange,
    Joined,
    Lease,
    LeaseAsk,
    Proposal,
    SessionListener,
    ShardMap,
    StreamSpec,
)
from ps.sharding.spec import ModelSignature
from ps.types import LeaveReason, Role
from workers.ranks import Ranks


class GroupControl:
    """`Control` of one rank. `join`, `open_stream` and `lease` are for all ranks together.

    All else is rank 0's: on other ranks it does nothing, or is not called.
    """

    def __init__(self, ranks: Ranks, control: Control | None) -> None:
        """`control` is rank 0's."""
        self._ranks = ranks
        self._control = control

    @property
    def _own(self) -> Control:
        assert self._control is not None, "for rank 0 only"
        return self._control

    def join(self, *, role: Role, name: str = "", timeout_s: float = 30.0) -> Joined:
        """See `Control.join`. The secret stays on rank 0."""
        secret = b""

        def act() -> Joined:
            nonlocal secret
            joined = self._own.join(role=role, name=name, timeout_s=timeout_s)
            secret = joined.secret
            return replace(joined, secret=b"")

        return replace(self._ranks.together("join()", act), secret=secret)

    def start_session(self, listener: SessionListener) -> None:
        """See `Control.start_session`."""
        self._ranks.together("join()", lambda: self._own.start_session(listener))

    def ready(self, address: str, *, timeout_s: float = 30.0) -> None:
        """Rank 0 only; see `Control.ready`."""
        self._own.ready(address, timeout_s=timeout_s)

    def take_part(self, part: bool, *, timeout_s: float = 30.0) -> None:
        """See `Control.take_part`."""
        if self._control is not None:
            self._control.take_part(part, timeout_s=timeout_s)

    def propose_model(self, signature: ModelSignature, *, wait_s: float = 2.0) -> Proposal:
        """Rank 0 only; see `Control.propose_model`."""
        return self._own.propose_model(signature, wait_s=wait_s)

    def finish_init(self, *, timeout_s: float = 30.0) -> ShardMap:
        """Rank 0 only; see `Control.finish_init`."""
        return self._own.finish_init(timeout_s=timeout_s)

    def shard_map(self) -> ShardMap | None:
        """Rank 0 only; see `Control.shard_map`."""
        return self._own.shard_map()

    def open_stream(self, spec: StreamSpec) -> int:
        """See `Control.open_stream`."""
        return self._ranks.together("epochs()", lambda: self._own.open_stream(spec), detail=repr(spec))

    def lease(self, ask: LeaseAsk, *, wait_s: float = 2.0) -> Lease:
        """See `Control.lease`. Rank 0's pace counts."""
        where = f"stream {ask.stream}, epoch {ask.epoch}, batches of {ask.batch_size}, last={ask.last!r}"
        return self._ranks.together("the next batch", lambda: self._own.lease(ask, wait_s=wait_s), detail=where)

    def ack(self, done: tuple[DataRange, ...], returned: tuple[DataRange, ...] = ()) -> None:
        """See `Control.ack`."""
        if self._control is not None:
            self._control.ack(done, returned)

    def report(self, numbers: Mapping[str, float]) -> None:
        """See `Control.report`."""
        if self._control is not None:
            self._control.report(numbers)

    def leave(self, reason: LeaveReason, *, exit_code: int = 0, detail: str = "") -> None:
        """See `Control.leave`."""
        if self._control is not None:
            self._control.leave(reason, exit_code=exit_code, detail=detail)

    def close(self) -> None:
        """See `Control.close`."""
        if self._control is not None:
            self._control.close()
