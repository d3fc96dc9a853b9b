"""`Worker`: what a training script holds."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from functools import partial
from types import TracebackType
from typing import Any, NoReturn, SupportsFloat

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from ps.clock import Clock, MonotonicClock
from ps.errors import ConfigError, PsError, UnsupportedError
from ps.types import LeaveReason, Role
from workers import registry
from workers.attach import Attachment, attach
from workers.attached import Attached
from workers.backend import Backend
from workers.config import WorkerConfig
from workers.data import Stream
from workers.epochs import Streams
from workers.lifecycle import DrainOnSigterm, Lifecycle, WorkerDrained, goodbye
from workers.model_buffers import Policies
from workers.schedule import Schedules

log = logging.getLogger(__name__)


class Worker(Streams):
    """One worker of a job. Not thread-safe: use it on the thread that owns the model.

    A context manager: leaving the block says goodbye, with the reason if it is left by an exception. After SIGTERM
    (main thread only) the worker finishes its step, hands its data back, leaves and raises `WorkerDrained`, a
    `SystemExit` with code 0: from the next batch, or from `step()` when no data stream is open. A second SIGTERM ends
    the process at once. In a forked child every method raises `ForkedProcess`.
    """

    def __init__(
        self,
        backend: Backend,
        config: WorkerConfig,
        *,
        clock: Clock | None = None,
        lifecycle: Lifecycle | None = None,
    ) -> None:
        super().__init__()
        self.control = backend.control
        self.lifecycle = lifecycle or Lifecycle()
        self.clock = clock or MonotonicClock()
        self.lookahead_s = config.lookahead_s
        self._backend = backend
        self._config = config
        self._attachment: Attached | None = None
        self._schedules = Schedules(self)
        self._aside = False
        """Whether others don't wait for this worker just now."""
        self._left = False
        self._closed = False
        self._sigterm = DrainOnSigterm(self.lifecycle)
        self._joined = self.control.join(role=Role.WORKER, name=config.name, timeout_s=config.join_timeout_s)
        self.control.start_session(self.lifecycle)
        self._sigterm.install()
        log.info("joined as %s, incarnation %d", self._joined.name, self._joined.incarnation)

    @property
    def name(self) -> str:
        """This worker's name in the job."""
        return self._joined.name

    @property
    def alone(self) -> bool:
        """Whether there is no coordinator: the whole job runs in this process."""
        return self._backend.alone

    @property
    def draining(self) -> bool:
        """Whether this worker has been asked to leave."""
        return self.lifecycle.draining

    @property
    def global_step(self) -> int:
        """Pushes of all workers that this model's weights hold; 0 before `attach`, rises with `step()` and `pull()`."""
        return self._attachment.client.global_step if self._attachment else 0

    @property
    def foreign_steps(self) -> int:
        """Those pushes in `global_step` that are not this worker's own."""
        return self._attachment.client.foreign_steps if self._attachment else 0

    def attach(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        *,
        accumulate: int = 1,
        on_nonfinite: str = "raise",
        buffers: Policies | None = None,
        buffers_every: int = 1,
    ) -> Optimizer:
        """Agree on initial weights with the job, and make `optimizer.step()` remote, in place; returns the same object.

        The first worker's weights count, and its optimizer's state if it has made steps; all others get them. Optimizer
        state lives on the servers, one step per push, and `state_dict()` reads it there. Frozen parameters and
        parameters in no group are transferred once. Blocks until servers are there and weights are in. Raises
        `UnsupportedError`, `ModelError` or `ModelMismatch` by name, leaving the optimizer as it was. Data loaders that
        fork worker processes should have done so before: RPC starts here.

        With `accumulate=k` call `step()` and `zero_grad()` for every micro-batch, with its undivided loss: each k-th
        step pushes the mean of the gradients since the last push, the others only keep theirs. The end of an epoch of
        `epochs()` pushes what is left, as the mean over those that were seen; elsewhere call `flush()`.

        `on_nonfinite` says what becomes of a step whose gradient holds inf or NaN: `raise`, `skip` it (no weight
        moves), or `zero` such elements; worker, step and parameter are named in the error or the log.

        `buffers` says what becomes of persistent floating-point buffers, such as BatchNorm's running statistics, that
        a forward pass has changed: they are sent with every `buffers_every`-th push, and the servers `average` them
        over the workers, weighted by samples (the default: what one process over all data would have), or keep the
        `latest`; or each worker keeps its own (`local`: those that others and exports get are the first worker's
        initial ones). Give one policy, or a dict from module names to policies. BatchNorm's counters take the maximum,
        other integers are `local`. Buffers change in `step()` and `pull()` only. With one worker all policies are the
        same: nothing changes.
        """
        self.lifecycle.check()
        self._check_not_left()
        if self._attachment is not None:
            raise UnsupportedError(
                "attach() was called already: one model with one optimizer per job. Put all parameters into one module "
                "and one optimizer with several param groups"
            )
        make = partial(
            attach,
            model,
            optimizer,
            joined=self._joined,
            control=self.control,
            open_transport=self._backend.open_transport,
            lifecycle=self.lifecycle,
            config=self._config,
            clock=self.clock,
            drain=self.drain,
            stepper=self,
            accumulate=accumulate,
            on_nonfinite=on_nonfinite,
            buffers=buffers,
            buffers_every=buffers_every,
        )
        self._attachment = self._attach(make, model, optimizer, accumulate)
        return optimizer

    def _attach(
        self, make: Callable[[], Attachment], model: nn.Module, optimizer: Optimizer, accumulate: int
    ) -> Attached:
        return make()

    @property
    def micro_batches(self) -> int:
        """Micro-batches that wait for the next push; 0 right after one, and without `attach(accumulate=...)`."""
        return self._attachment.batches.calls if self._attachment else 0

    def step(self) -> None:
        """What the attached optimizer's `step()` does: push the gradients and take the new weights.

        With `attach(accumulate=k)` only every k-th call does, the others keep the gradients for it.
        """
        self.lifecycle.check()
        self._check_not_left()
        assert self._attachment is not None
        if self._attachment.batches.add():
            self._push()
        if self.lifecycle.draining and not any(stream.open for stream in self._streams):
            self.drain()

    def flush(self) -> None:
        """Push the micro-batches that wait, if any, as the mean over them. Epochs of `epochs()` do it at their end."""
        self.lifecycle.check()
        self._check_not_left()
        if self.micro_batches:
            self._push()

    def step_aside(self) -> None:
        """Let nobody wait for this worker's pushes (in bsp and ssp) until the next one. For data streams, which wait
        for data that others hold."""
        if self._attachment is not None and self._joined.settings.consistency != "asp":
            self._aside = True
            self.control.take_part(False)

    def _take_part(self) -> None:
        if self._aside:
            self.control.take_part(True)
            self._aside = False

    def abandon(self) -> None:
        """Forget the micro-batches that wait, without pushing them. Called when their samples are handed back."""
        if self._attachment is not None:
            self._attachment.batches.drop()

    def _push(self) -> None:
        assert self._attachment is not None
        samples = sum(stream.ledger.unpushed for stream in self._streams)
        self._take_part()
        self._attachment.push(samples)
        self.lifecycle.count_step(samples)
        for stream in self._streams:
            stream.ledger.pushed()

    def schedule(self, scheduler: LRScheduler, per: str = "step") -> LRScheduler:
        """Let a learning-rate scheduler follow the job instead of this worker alone; returns the same object.

        With `per="step"` its `step()`, called after each `optimizer.step()`, goes on by one, and by one more for each
        push of other workers that has arrived: all workers stand at `global_step`, and a schedule made for the whole
        data set is gone through once, by all of them together. A worker that joins late starts there. Call it after
        `attach`. With `per="epoch"`, for a `step()` at the end of each epoch, a late worker starts at the epoch it
        joins in. Without `schedule`, a scheduler counts its own worker's steps. With one worker there is no difference.
        Each push carries its own worker's current values. Raises `UnsupportedError` for `ReduceLROnPlateau`.
        """
        if self._attachment is None and per == "step":
            raise ConfigError("schedule() before attach(): which step the job is at is known once a model is attached")
        self._schedules.add(scheduler, per)
        return scheduler

    def pull(self) -> None:
        """Take the newest weights and shared buffers into the model, for example before evaluation.

        Buffers that have changed here are sent first. While nobody else pushes (one worker, after a round, at the end)
        all of it is of one version, and the same in every process; while others do, each shard is of its own newest one
        and buffers are at most a push of each other worker away from the weights. Local edits of trained weights are
        undone. Call it between steps, not between forward and backward.
        """
        self.lifecycle.check()
        self._check_not_left()
        if self._attachment is None:
            raise ConfigError("pull() before attach(): there is no model to pull into")
        self._attachment.pull()

    def optimizer_state(self) -> dict[Tensor, dict[str, object]]:
        """What the attached optimizer's `state_dict()` holds: its state on the servers, of each parameter with any."""
        self.lifecycle.check()
        self._check_not_left()
        assert self._attachment is not None
        return self._attachment.optimizer_state()

    def load(
        self,
        state_dict: Mapping[str, object] | None = None,
        *,
        strict: bool = True,
        optimizer_state: Mapping[str, Any] | None = None,
    ) -> None:
        """Load weights into the model and, through the servers, for everybody: `model.load_state_dict` after `attach`.

        Allowed for the only worker of the job, or before anybody has made a step; then other workers have the weights
        after their next `step()` or `pull()`. Buffers are loaded here only. `optimizer_state` is the `state_dict()` of
        an optimizer, attached or plain; without it, state on the servers stays as it is. Raises `Refused` otherwise,
        and what `load_state_dict` raises; the model then has the servers' weights.
        """
        self.lifecycle.check()
        self._check_not_left()
        if self._attachment is None:
            raise ConfigError("load() before attach(): there call model.load_state_dict(), the first worker's counts")
        if state_dict is not None:
            self._attachment.load(state_dict, strict=strict)
        if optimizer_state is not None:
            self._attachment.load_optimizer(optimizer_state)

    def report(self, **numbers: SupportsFloat) -> None:
        """Numbers for status and `summary.json`, e.g. `report(test_accuracy=0.98)`; the last value of a name wins."""
        self.lifecycle.check()
        self._check_not_left()
        self.control.report({key: float(value) for key, value in numbers.items()})

    def drain(self) -> NoReturn:
        """Hand everything back, leave the job, raise `WorkerDrained`. Called by data streams, `attach` and `step`."""
        reason = self.lifecycle.drain_reason
        log.info("leaving: %s", reason)
        self.flush()
        self._hand_back()
        self._leave(LeaveReason.DRAINED, 0, reason)
        raise WorkerDrained(reason)

    def close(self) -> None:
        """Leave the job (as done, unless it was left already) and stop all threads and connections. Idempotent."""
        self.finish(None)

    def finish(self, error: BaseException | None) -> None:
        """Leave the job as the script ended: `error` is what it raised, None for its normal end. Idempotent; blocks
        within the bounds of leaving and closing."""
        if self._closed:
            return
        self.lifecycle.check_fork()
        self._closed = True
        try:
            if error is None:
                self._flush_at_end()
            self._hand_back()
            self._leave(*goodbye(error))
        finally:
            self._sigterm.restore()
            registry.forget(self)
            self._close_streams()
            if self._attachment is not None:
                self._attachment.close()
            self.control.close()
            self._backend.close()

    def __enter__(self) -> Worker:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.finish(error)

    def __reduce__(self) -> NoReturn:
        raise TypeError("a Worker can't be pickled or copied: it is this process's place in the job")

    def _flush_at_end(self) -> None:
        """For micro-batches of the script's own data, whose end nobody else sees."""
        if not self.micro_batches or self._left or self.lifecycle.fatal:
            return
        try:
            self._push()
        except PsError as error:
            log.warning("the last %d micro-batches could not be pushed: %s", self.micro_batches, error)

    def _leave(self, reason: LeaveReason, exit_code: int, detail: str) -> None:
        if self._left:
            return
        self._left = True
        if self.lifecycle.gone:
            return
        try:
            if self._attachment is not None and reason is not LeaveReason.FAILED and not self.lifecycle.fatal:
                self._attachment.push_buffers()
        except PsError as error:
            log.warning("the last changes of buffers could not be pushed: %s", error)
        try:
            self.control.leave(reason, exit_code=exit_code, detail=detail)
        except PsError as error:
            log.warning("could not say goodbye to the coordinator: %s", error)

    def _check_usable(self) -> None:
        self.lifecycle.check()
        self._check_not_left()

    def _needs_push(self) -> bool:
        return self._attachment is not None

    def _opened(self, stream: Stream[object]) -> None:
        self._schedules.opened(stream.next_epoch)

    def _check_not_left(self) -> None:
        if self._left or self._closed:
            raise PsError(f"worker {self.name} has left the job; join() again in a new process")
