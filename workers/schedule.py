"""Learning-rate schedules of a job with several workers: one schedule that all of them stand in at the same place.

A scheduler that is left alone counts its own worker's steps: with N workers each goes through an N-th of it, and one
that joins late starts from the beginning, warm-up and all, beside others at their peak.
"""

from __future__ import annotations

import logging
import warnings
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol, SupportsIndex, cast

from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from ps.errors import ConfigError, UnsupportedError

log = logging.getLogger(__name__)

UNITS = ("step", "epoch")


class Job(Protocol):
    """The worker, as schedules see it."""

    @property
    def global_step(self) -> int:
        """Pushes of all workers that the model's weights hold."""
        ...

    @property
    def foreign_steps(self) -> int:
        """Those of them that are not this worker's own."""
        ...

    @property
    def micro_batches(self) -> int:
        """Micro-batches that wait for the next push."""
        ...


@dataclass(slots=True)
class _Place:
    """Where a scheduler is."""

    job: Job
    done: int
    """Steps it has made."""
    foreign: int
    """`foreign_steps` when it was looked at last."""
    clamped: bool = False

    def due(self, total: int | None) -> int:
        """Steps to make now that the worker has made one: that one, and those of others since the last time.

        `total` is where the schedule ends, if it does. With others about, who may make a few steps more than planned,
        it stays there; without, the scheduler raises its own error.
        """
        foreign = self.job.foreign_steps
        others = max(0, foreign - self.foreign)
        self.foreign = max(foreign, self.foreign)
        steps = 1 + others
        if total is not None and self.done + steps > total and self.foreign:
            steps = max(0, total - self.done)
            if not self.clamped:
                log.warning("the schedule of %d steps is over, and the job goes on: the last values stay", total)
            self.clamped = True
        self.done += steps
        return steps


_places: weakref.WeakKeyDictionary[LRScheduler, _Place] = weakref.WeakKeyDictionary()
"""Kept apart from the schedulers, whose `state_dict` writes down all that they have."""


class FollowingStep(LRScheduler):
    """Mixin in front of the scheduler's class: `step` goes as far as the job has gone."""

    _ps_local: type[LRScheduler]

    def step(self, *args: object, **kwargs: object) -> None:
        """One step for the worker's own push, and one for each push of others that has arrived since the last call.

        Does nothing while micro-batches wait for their push. With arguments: the scheduler's own step.
        """
        step = cast("Callable[..., None]", super().step)
        place = _places.get(self)
        if place is None or args or kwargs:
            step(*args, **kwargs)
        elif not place.job.micro_batches:
            for _ in range(place.due(getattr(self, "total_steps", None))):
                step()

    def __reduce_ex__(self, protocol: SupportsIndex) -> tuple[object, ...]:
        """Copies and pickles are plain schedulers of the user's class."""
        return _blank, (self._ps_local,), self.__getstate__()


def _blank(local: type[LRScheduler]) -> LRScheduler:
    """A scheduler without content, for copies to fill."""
    return local.__new__(local)


_following_classes: dict[type[LRScheduler], type[FollowingStep]] = {}  # one entry per scheduler class of the program


def following_class(local: type[LRScheduler]) -> type[FollowingStep]:
    """The subclass of `local` that follows the job; the same one each time."""
    if local not in _following_classes:
        body = {"__doc__": f"{local.__name__} that follows its job.", "__module__": __name__, "_ps_local": local}
        _following_classes[local] = cast(
            "type[FollowingStep]", type(f"Following{local.__name__}", (FollowingStep, local), body)
        )
    return _following_classes[local]


class Schedules:
    """A worker's schedules. Not thread-safe: for the training thread."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._by_epoch: weakref.WeakSet[LRScheduler] = weakref.WeakSet()
        self._epoch = 0

    def add(self, scheduler: LRScheduler, per: str) -> None:
        """See `Worker.schedule`."""
        _check(scheduler, per)
        if per == "epoch":
            self._by_epoch.add(scheduler)
            _forward(scheduler, self._epoch)
            return
        _places.pop(scheduler, None)
        _forward(scheduler, self._job.global_step)
        if not isinstance(scheduler, FollowingStep):
            scheduler.__class__ = following_class(type(scheduler))
        _places[scheduler] = _Place(self._job, position(scheduler), self._job.foreign_steps)

    def opened(self, epoch: int) -> None:
        """A data stream starts at this epoch: schedules by epoch go there, if they are not further on already."""
        self._epoch = max(self._epoch, epoch)
        for scheduler in self._by_epoch:
            _forward(scheduler, self._epoch)


def position(scheduler: LRScheduler) -> int:
    """Steps that a scheduler has made; of a chain, those of its first link."""
    state = cast("Mapping[str, object]", scheduler.state_dict())
    while "last_epoch" not in state:
        state = cast("list[Mapping[str, object]]", state["_schedulers"])[0]
    return max(0, int(cast(int, state["last_epoch"])))


def _forward(scheduler: LRScheduler, target: int) -> None:
    """Step by step, since most schedules are defined by recursion: about 10 s per million."""
    at = position(scheduler)
    target = min(target, getattr(scheduler, "total_steps", target))
    if target <= at:
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # torch expects that the optimizer has made a step by now
        for _ in range(target - at):
            scheduler.step()
    log.info("%s: from step %d to %d, where the job is", type(scheduler).__name__, at, target)


def _check(scheduler: LRScheduler, per: str) -> None:
    if per not in UNITS:
        raise ConfigError(f"schedule(per={per!r}) must be one of: {', '.join(UNITS)}")
    if isinstance(scheduler, ReduceLROnPlateau):
        raise UnsupportedError(
            "schedule() can't follow the job with ReduceLROnPlateau: it goes by each worker's own metric, not by "
            "steps. Call its step(metric) yourself, on a metric that all workers share"
        )
    if not isinstance(scheduler, LRScheduler):
        raise TypeError(f"schedule() takes a scheduler of torch, got {type(scheduler).__name__}")
