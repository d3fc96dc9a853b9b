"""The model's agreement and its shard map: the first model counts, one worker writes it, all changes are numbered."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from ps.control.api import Holder, ServerPeer, ShardMap
from ps.control.records import MapRecord, Record
from ps.errors import ModelMismatch, Refused
from ps.sharding.assign import place
from ps.sharding.partition import make_plan
from ps.sharding.spec import ModelSignature, ParamSpec, ShardingPlan
from ps.types import Incarnation, ShardId


class ModelTable:
    """What the job trains and where it lies. Not thread-safe; reads no clock."""

    def __init__(self, emit: Callable[[Record], None]) -> None:
        self._emit = emit
        self.shard_map: ShardMap | None = None
        self.plan: ShardingPlan | None = None
        """Plan of `shard_map`."""
        self.initialiser: Incarnation | None = None
        """Who writes the initial weights just now; None before, after and when that worker has gone."""

    def adopt(self, record: MapRecord) -> None:
        """Take over the map from the journal."""
        self.shard_map = record.shard_map
        self.plan = make_plan(record.shard_map.signature, record.shard_map.shard_bytes)
        self.initialiser = record.initialiser

    @property
    def ready(self) -> bool:
        """Whether the initial weights are complete."""
        return self.shard_map is not None and self.shard_map.initialised_by is not None

    @property
    def epoch(self) -> int:
        """Epoch of the map, 0 without one."""
        return self.shard_map.epoch if self.shard_map else 0

    def holders(self) -> list[Incarnation]:
        """Servers that hold at least one shard."""
        return list(dict.fromkeys(holder.incarnation for holder in self.shard_map.holders)) if self.shard_map else []

    def check(self, signature: ModelSignature) -> None:
        """Raise `ModelMismatch` naming the first difference to the job's model."""
        if self.shard_map is not None and signature != self.shard_map.signature:
            raise ModelMismatch(
                f"this worker's model differs from the one the job trains: "
                f"{first_difference(self.shard_map.signature, signature)}"
            )

    def place(self, signature: ModelSignature, shard_bytes: int, servers: Sequence[ServerPeer]) -> None:
        """The first model: plan it and spread it over `servers`. Raises `ModelError` if it can't be sharded."""
        assert self.shard_map is None
        self.plan = make_plan(signature, shard_bytes)
        holders = place(self.plan, [peer.incarnation for peer in servers])
        self._set(
            ShardMap(
                epoch=1,
                signature=signature,
                shard_bytes=shard_bytes,
                holders=tuple(Holder(shard=ShardId(i), epoch=1, incarnation=inc) for i, inc in enumerate(holders)),
                servers=tuple(servers),
                initialised_by=None,
            )
        )

    def appoint(self, worker: Incarnation | None) -> None:
        """This worker writes the initial weights (None: whoever did is gone)."""
        assert self.shard_map is not None
        if worker != self.initialiser:
            self.initialiser = worker
            self._set(self.shard_map)

    def finish_init(self, worker: Incarnation) -> ShardMap:
        """The initial weights are those of `worker`. Again is fine. Raises `Refused` if it is not the initialiser."""
        if self.shard_map is None or (self.initialiser != worker and self.shard_map.initialised_by != worker):
            raise Refused(f"incarnation {worker} was not told to write the initial weights")
        if self.shard_map.initialised_by is None:
            self.initialiser = None
            self._set(replace(self.shard_map, epoch=self.shard_map.epoch + 1, initialised_by=worker))
        return self.shard_map

    def validate(self) -> None:
        """Assert what holds between events."""
        if self.shard_map is None:
            assert self.plan is None and self.initialiser is None
            return
        assert self.plan is not None and len(self.plan.shards) == len(self.shard_map.holders)
        assert [holder.shard for holder in self.shard_map.holders] == list(range(len(self.plan.shards)))
        assert set(self.holders()) <= {peer.incarnation for peer in self.shard_map.servers}
        assert self.initialiser is None or not self.ready

    def _set(self, shard_map: ShardMap) -> None:
        self.shard_map = shard_map
        self._emit(MapRecord(shard_map=shard_map, initialiser=self.initialiser))


def first_difference(job: ModelSignature, mine: ModelSignature) -> str:
    """What a user has to look at when two workers' models differ."""
    for index, (theirs, ours) in enumerate(zip(job.params, mine.params, strict=False)):
        if theirs != ours:
            return f"parameter {index} is {_describe(ours)} here, {_describe(theirs)} in the job"
    if len(job.params) != len(mine.params):
        longer, where = (job, "the job") if len(job.params) > len(mine.params) else (mine, "this worker")
        extra = longer.params[min(len(job.params), len(mine.params))]
        return (
            f"{len(mine.params)} parameters here, {len(job.params)} in the job; the first that only {where} has is "
            f"{_describe(extra)}"
        )
    if job.optimizer != mine.optimizer:
        return f"optimizer {mine.optimizer} here, {job.optimizer} in the job"
    return f"whole_tensors={mine.whole_tensors} here, {job.whole_tensors} in the job"


def _describe(param: ParamSpec) -> str:
    if param.buffer:
        return f"buffer {param.name!r} {list(param.shape)} {param.dtype} ({param.buffer})"
    group = f"group {param.group}" if param.group >= 0 else "no group"
    kind = "sparse, " if param.sparse else ""
    return f"{param.name!r} {list(param.shape)} {param.dtype} ({kind}{group})"
