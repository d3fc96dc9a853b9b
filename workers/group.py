"""A worker that is a process group: under torchrun and DistributedDataParallel all ranks are one worker of the job.

    torch.distributed.init_process_group()
    with workers.join() as worker:
        model = DistributedDataParallel(Net())
        worker.attach(model, optimizer)
        for x, y in epoch: ...                      # this rank's part of each batch
            loss.backward()                         # the group reduces gradients, as without torch-ps
            optimizer.step()                        # rank 0 pushes them; all ranks get the new weights

Rank 0 is the member of the job; the others talk to it only. All ranks run the same script, and call `join`, `attach`,
`step`, `pull`, `load`, `epochs` and the next batch together; `report` counts on rank 0, and may be left out on others.
Param groups are rank 0's. When a rank is lost the group ends, and hands its data back; other workers go on.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from ps.control.api import Control, Joined
from ps.errors import LocalWeightEdit, ModelError, UnsupportedError
from ps.rpc.transport import Transport
from ps.sharding.spec import LOCAL, NO_GROUP
from ps.types import LeaveReason
from workers.attach import Attachment, check_unattached
from workers.attached import Attached, Counts
from workers.backend import Backend
from workers.config import WorkerConfig
from workers.group_control import GroupControl
from workers.microbatches import MicroBatches
from workers.model_buffers import describe_buffers
from workers.optimizer import convert
from workers.ranks import Call, Ranks
from workers.share import Share
from workers.signature import Description, describe
from workers.spread import Spread, alike, sample_gradients
from workers.worker import Worker

log = logging.getLogger(__name__)

WRAP_FIRST = (
    "in a process group: DistributedDataParallel writes the weights when it is made; make it before worker.attach()"
)


class GroupWorker(Worker):
    """One rank of a worker. All ranks call its methods together, but for `report` and what only reads."""

    def __init__(self, ranks: Ranks, backend: Backend | None, config: WorkerConfig) -> None:
        """`backend` is rank 0's."""
        self._ranks = ranks
        super().__init__(_GroupBackend(ranks, backend, config), config, lifecycle=ranks.lifecycle)
        self.share = Share(ranks.rank, ranks.size)
        log.info("rank %d of the %d of %s", ranks.rank, ranks.size, self.name)

    def finish(self, error: BaseException | None) -> None:
        """See `Worker.finish`. Rank 0 waits for the other ranks, unless it has failed itself."""
        try:
            super().finish(error)
        finally:
            self._ranks.close()

    def _attach(
        self, make: Callable[[], Attachment], model: nn.Module, optimizer: Optimizer, accumulate: int
    ) -> Attached:
        description, detail, problem = _describe(model, optimizer)
        own: Attachment | None = None

        def act() -> None:
            nonlocal own
            own = make()

        self._ranks.together("attach()", act, detail=detail, error=problem)
        assert description is not None
        attached = GroupAttachment(self._ranks, model, description, own, accumulate)
        try:
            attached.spread_everything()
        except BaseException:
            attached.close()
            raise
        if own is None:
            convert(optimizer, self)
        return attached

    def _leave(self, reason: LeaveReason, exit_code: int, detail: str) -> None:
        if self._left:
            return
        if not self._ranks.leads:
            self._ranks.end(detail or f"exit code {exit_code}" if reason is LeaveReason.FAILED else "")
        elif reason is not LeaveReason.DRAINED:
            self._ranks.farewell(patient=reason is LeaveReason.DONE)
            reason, exit_code, detail = self._as_a_whole(reason, exit_code, detail)
        super()._leave(reason, exit_code, detail)

    def _as_a_whole(self, reason: LeaveReason, exit_code: int, detail: str) -> tuple[LeaveReason, int, str]:
        """How the group has ended, of which rank 0 has ended so. A rank that was killed is no failure of the job."""
        if self._ranks.lost:
            gone = ", ".join(map(str, sorted(self._ranks.lost)))
            return LeaveReason.DRAINED, 0, f"lost rank {gone} of its process group"
        others = [f"rank {rank}: {why}" for rank, why in self._ranks.failed.items() if why != detail]
        if not others:
            return reason, exit_code, detail
        return LeaveReason.FAILED, exit_code or 1, "; ".join([*filter(None, [detail]), *others])[:500]


def _describe(model: nn.Module, optimizer: Optimizer) -> tuple[Description | None, str, Exception | None]:
    """What this rank has, in short what must be the same on all of them, and what is wrong with it."""
    try:
        check_unattached(optimizer)
        found = describe(model, optimizer)
    except (ModelError, TypeError) as error:
        return None, "", error
    digest = hashlib.sha256(repr(found.signature).encode()).hexdigest()[:8]
    return found, f"{found.signature.optimizer} of {len(found.params)} parameters, {digest}", None


class GroupAttachment:
    """`Attached` for one rank of a group. Not thread-safe: for the thread that owns the model."""

    def __init__(
        self, ranks: Ranks, model: nn.Module, description: Description, own: Attachment | None, accumulate: int
    ) -> None:
        """`own` is rank 0's line to the servers."""
        self.client: Counts = _Counts()
        # Followers count micro-batches, and keep no gradients of them.
        self.batches = own.batches if own is not None else MicroBatches((), accumulate)
        self._ranks = ranks
        self._own = own
        self._spread = Spread(ranks.group)
        specs = description.signature.params[: len(description.params)]
        self._params = description.params
        self._trained = [p for p, spec in zip(description.params, specs, strict=True) if spec.group != NO_GROUP]
        self._names = [spec.name for spec in specs if spec.group != NO_GROUP]
        self._buffers = describe_buffers(model, LOCAL)
        self._seen: list[int] = []

    def push(self, samples: int) -> None:
        """Push rank 0's gradients, which must be those of all ranks, and give all of them the new weights."""
        sample = sample_gradients(self._trained, self.client.global_step) if self._trained else ()

        def check(calls: Mapping[int, Call]) -> None:
            _check_reduced(sample, calls)

        try:
            self._act("step()", lambda own: own.push(samples), error=self._edited(), sample=sample, check=check)
        finally:
            if self._own is None:
                self.batches.drop()
        self._spread(self._trained, leads=self._ranks.leads)
        self._remember()

    def push_buffers(self) -> None:
        """Rank 0 only, on its own; see `Attached`."""
        if self._own is not None:
            self._own.push_buffers()

    def pull(self) -> None:
        """Give all ranks the newest weights and buffers."""
        self._act("pull()", lambda own: own.pull())
        self.spread_everything()

    def load(self, state_dict: Mapping[str, object], *, strict: bool) -> None:
        """Load what rank 0 was given, for everybody."""
        self._act("load()", lambda own: own.load(state_dict, strict=strict))
        self.spread_everything()

    def optimizer_state(self) -> dict[Tensor, dict[str, object]]:
        """On rank 0, without the others; see `Attached`."""
        if self._own is None:
            raise UnsupportedError(
                f"optimizer.state_dict() on rank {self._ranks.rank} of a process group: the state is on the servers, "
                "and rank 0 has the line to them. Call it on rank 0 only"
            )
        return self._own.optimizer_state()

    def load_optimizer(self, state_dict: Mapping[str, Any]) -> None:
        """Load the state that rank 0 was given, for everybody."""
        self._act("load(optimizer_state=...)", lambda own: own.load_optimizer(state_dict))

    def close(self) -> None:
        """See `Attached`."""
        if self._own is not None:
            self._own.close()

    def spread_everything(self) -> None:
        """Give all ranks rank 0's parameters, trained or not, and its persistent buffers."""
        tensors = [*self._params, *(buffer.tensor for buffer in self._buffers)]
        self._spread(tensors, leads=self._ranks.leads)
        self._remember()

    def _act(self, what: str, do: Callable[[Attachment], None], **options: Any) -> None:
        """Let rank 0 do something with the servers, and note on all ranks where the weights are then."""

        def act() -> Counts:
            assert self._own is not None
            try:
                do(self._own)
            except LocalWeightEdit as error:
                error.add_note(WRAP_FIRST)
                raise
            return _Counts(self._own.client.global_step, self._own.client.foreign_steps)

        self.client = self._ranks.together(what, act, **options)

    def _remember(self) -> None:
        if not self._ranks.leads:  # rank 0's attachment does it itself
            self._seen = [param._version for param in self._trained]

    def _edited(self) -> LocalWeightEdit | None:
        now = [param._version for param in self._trained] if not self._ranks.leads else []
        for name, version, seen in zip(self._names, now, self._seen, strict=False):
            if version != seen:
                error = LocalWeightEdit(
                    f"weights of {name!r} were changed locally on rank {self._ranks.rank}: the servers own the weights "
                    "and would overwrite the change. Change weights before attach(), or call worker.pull() on all "
                    "ranks to take the servers' again"
                )
                error.add_note(WRAP_FIRST)
                return error
        return None


@dataclass(frozen=True, slots=True)
class _Counts:
    """See `Counts`."""

    global_step: int = 0
    foreign_steps: int = 0


def _check_reduced(mine: tuple[float, ...], calls: Mapping[int, Call]) -> None:
    """Raise `UnsupportedError` when ranks come to a step with gradients of their own."""
    for rank, call in calls.items():
        if not alike(mine, call.sample):
            raise UnsupportedError(
                f"step() in a process group: the gradients of rank {rank} are not those of rank 0, so nothing has "
                "reduced them. Run the model through DistributedDataParallel(model), or average gradients with "
                "all_reduce before step(); and leave no_sync() before the last backward. Nothing was sent"
            )


class _GroupBackend:
    """`Backend` of a rank: rank 0's own, shared with the others as far as they need it."""

    def __init__(self, ranks: Ranks, backend: Backend | None, config: WorkerConfig) -> None:
        self._ranks = ranks
        self._backend = backend
        self.alone = config.coordinator is None
        self.control: Control = GroupControl(ranks, backend.control if backend is not None else None)

    def open_transport(self, joined: Joined) -> Transport:
        """See `Backend.open_transport`."""
        assert self._backend is not None
        return self._backend.open_transport(joined)

    def close(self) -> None:
        """See `Backend.close`."""
        if self._backend is not None:
            self._backend.close()
