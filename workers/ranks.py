"""The line between the ranks of a worker that is a process group: rank 0 leads, the others follow.

What the ranks do together is a meeting: each follower says what it is about to do, rank 0 sees that all mean the same,
does it, and tells the result, or the error, which then all of them return or raise. News from outside (the job's end,
SIGTERM) count from the next meeting on, so that all ranks act on them at the same place of the script.

Plain sockets and not collectives: the end of a process is noticed at once, at either end, and messages need nobody who
waits for them. Everything runs on the thread that calls.
"""

from __future__ import annotations

import contextlib
import pickle
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import TypeVar, cast

from torch import distributed

from ps.clock import Clock, Deadline, MonotonicClock
from ps.errors import GroupLost, PsError
from workers.group_lifecycle import GroupLifecycle, News
from workers.group_watch import LeaderWatch

T = TypeVar("T")
GroupHandle = distributed.ProcessGroup

_SLICE_S = 0.5
"""How often a wait looks up to see whether the job still runs."""
_AFTERMATH_S = 1.0
"""How long rank 0, when it fails, waits for word of a rank whose end may be the reason."""
PATIENCE_S = 1800.0
"""How long rank 0, at the end of its script, waits for the ends of the others; as long as gloo and NCCL do."""


@dataclass(frozen=True, slots=True)
class Call:
    """A follower is about to do something together with the others."""

    what: str
    """For error messages, e.g. `step()`."""
    detail: str = ""
    """What must be the same on all ranks besides."""
    drain: str = ""
    """Why this rank has been asked to leave."""
    error: BaseException | None = None
    """Why it can't take part."""
    sample: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class End:
    """A follower has left; `error` is empty for the normal end of its script."""

    error: str


@dataclass(frozen=True, slots=True)
class Outcome:
    """What came of a meeting."""

    value: object
    error: BaseException | None
    news: News


class Ranks:
    """One rank's end of the line. Not thread-safe: for the training thread."""

    def __init__(
        self,
        rank: int,
        size: int,
        lines: Mapping[int, Connection],
        *,
        group: GroupHandle | None = None,
        clock: Clock | None = None,
        watch: LeaderWatch | None = None,
    ) -> None:
        """`lines`: rank 0's to each of the others, or to rank 0. `group` is for tensors in main memory. `watch`: a
        follower's, for its whole process."""
        self.rank = rank
        self.size = size
        self.group = group
        self.lifecycle = GroupLifecycle()
        self.failed: dict[int, str] = {}
        """Rank 0: what other ranks have failed with."""
        self.lost: set[int] = set()
        """Ranks whose process has ended without a word."""
        self._lines = dict(lines)
        self._ended: set[int] = set()
        self._clock = clock or MonotonicClock()
        self._watch = watch

    @property
    def leads(self) -> bool:
        """Whether this is rank 0."""
        return self.rank == 0

    def together(
        self,
        what: str,
        act: Callable[[], T],
        *,
        detail: str = "",
        error: BaseException | None = None,
        sample: tuple[float, ...] = (),
        check: Callable[[Mapping[int, Call]], None] | None = None,
    ) -> T:
        """Rank 0 does `act` when all ranks are here; each of them gets what it returns, or raises what it raises.

        Nothing is done, and all ranks raise, if one of them brings an `error`, is about to do something else, or if
        rank 0's `check` of what the others say raises. Blocks until the others are here. Raises `GroupLost` when the
        process of another rank has ended.
        """
        self.lifecycle.check_fork()
        mine = Call(what, detail, self.lifecycle.live.drain_reason, error, sample)
        outcome = self._lead(mine, act, check) if self.leads else self._follow(mine)
        self.lifecycle.adopt(outcome.news)
        if outcome.error is not None:
            raise outcome.error
        return cast(T, outcome.value)

    def end(self, error: str) -> None:
        """A follower leaves; `error` says what its script has failed with, if it has."""
        with contextlib.suppress(OSError):
            self._lines[0].send(End(error))

    def farewell(self, *, patient: bool) -> None:
        """Rank 0 leaves: hear how the other ranks have ended, and write it down in `failed` and `lost`.

        `patient`: wait for those whose script goes on, while the job does. Otherwise only for what is on its way.
        """
        wait_s = PATIENCE_S if patient else _AFTERMATH_S
        deadline = Deadline.after(self._clock, wait_s)
        for rank in self._lines:
            while rank not in self._ended | self.lost and not deadline.expired(self._clock):
                if self._lines[rank].poll(min(_SLICE_S, deadline.remaining_s(self._clock))):
                    self._part(rank, patient)
                elif self.lifecycle.live.fatal:
                    break

    def close(self) -> None:
        """Close the line: the others notice. Idempotent."""
        if self._watch is not None:
            self._watch.close()
        for line in self._lines.values():
            line.close()

    # ---- pieces of the above ----

    def _lead(self, mine: Call, act: Callable[[], T], check: Callable[[Mapping[int, Call]], None] | None) -> Outcome:
        calls: dict[int, Call] = {}
        value: object = None
        problem: BaseException | None = None
        try:
            self._gather(calls)
            self._compare(mine, calls)
            if check is not None:
                check(calls)
            with self.lifecycle.at_once():
                value = act()
        except BaseException as error:  # all ranks raise it, this one in `together`
            problem = error
        outcome = Outcome(value, problem, self.lifecycle.heard())
        for rank in calls:
            self._tell(rank, outcome)
        return outcome

    def _gather(self, calls: dict[int, Call]) -> None:
        """What each follower is about to do."""
        for rank in self._lines:
            message = self._receive(rank) if rank not in self._ended else None
            if isinstance(message, Call):
                calls[rank] = message
        for rank, call in calls.items():
            if call.drain:
                self.lifecycle.request_drain(f"rank {rank}: {call.drain}")

    def _compare(self, mine: Call, calls: Mapping[int, Call]) -> None:
        for error in (mine.error, *(call.error for call in calls.values())):
            if error is not None:
                raise error
        for rank in self._ended:
            why = self.failed.get(rank)
            raise PsError(
                f"rank {rank} of this worker's process group has {f'failed: {why}' if why else 'left'}, and rank 0 is "
                f"in {mine.what}; a group goes on only as a whole"
            )
        for rank, call in calls.items():
            if (call.what, call.detail) != (mine.what, mine.detail):
                raise PsError(
                    f"rank {rank} is in {call.what}{_of(call.detail)}, and rank 0 in {mine.what}{_of(mine.detail)}: "
                    "all ranks of a process group must do the same, in the same order"
                )

    def _follow(self, mine: Call) -> Outcome:
        if mine.error is not None:
            mine = Call(mine.what, mine.detail, mine.drain, _portable(mine.error, self.rank))
        self._tell(0, mine)
        outcome = self._receive(0)
        assert isinstance(outcome, Outcome)
        return outcome

    def _tell(self, rank: int, message: Call | Outcome) -> None:
        if isinstance(message, Outcome) and message.error is not None:
            message = Outcome(None, _portable(message.error, 0), message.news)
        with contextlib.suppress(OSError):  # gone: the next `_receive` says so
            self._lines[rank].send(message)

    def _receive(self, rank: int) -> object:
        """The next message of a rank; waits for it. Raises `GroupLost`. Notes the end of a follower."""
        line = self._lines[rank]
        try:
            while not line.poll(_SLICE_S):  # in slices, so that signal handlers run
                pass
            message: object = line.recv()
        except (EOFError, OSError):
            self.lost.add(rank)
            raise GroupLost(
                f"rank {rank} of this worker's process group of {self.size} is gone: its process has ended, or its "
                "host can't be reached. The group ends with it; start all of its ranks again"
            ) from None
        if isinstance(message, End):
            self._ended.add(rank)
            if message.error:
                self.failed[rank] = message.error
        return message

    def _part(self, rank: int, patient: bool) -> None:
        """Take one message of a rank after this one, rank 0, has left."""
        with contextlib.suppress(GroupLost):
            message = self._receive(rank)
            if isinstance(message, Call):
                error = PsError(
                    f"rank {rank} is in {message.what}, and rank 0 has {'left the job' if patient else 'failed'}: all "
                    "ranks of a process group must do the same, in the same order"
                )
                self._tell(rank, Outcome(None, error, self.lifecycle.heard()))


def _of(detail: str) -> str:
    return f" ({detail})" if detail else ""


def _portable(error: BaseException, rank: int) -> BaseException:
    """The error as another rank can raise it: of the same type, if that can travel."""
    try:
        copy = pickle.loads(pickle.dumps(error))  # noqa: S301 - made in this line
        assert type(copy) is type(error)
    except Exception:
        copy = PsError(f"{type(error).__name__}: {error}")
        if isinstance(error, SystemExit):
            copy = SystemExit(error.code)
    if not getattr(copy, "__notes__", None):
        copy.add_note(f"raised on rank {rank} of the process group")
    return cast(BaseException, copy)
