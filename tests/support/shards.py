"""A small model on one host, and callers of it; for tests of servers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ps.control.api import Admitted, Holder, ServerPeer, ShardMap
from ps.optim.spec import hyper, served
from ps.rpc.wire import Caller, Hello, Init, Load, Pull, Push, Reply, Request, ShardPush, Status
from ps.server.host import Host
from ps.sharding.layout import payload_bytes
from ps.sharding.partition import make_plan
from ps.sharding.spec import NO_GROUP, ModelSignature, ParamSpec, ShardingPlan
from ps.types import Hyper, Incarnation, Role, ShardId, Version

SERVER = Incarnation(1)
SECRET = b"0123456789abcdef"


def signature(
    *sizes: int, optimizer: str = "SGD", dtype: str = "float32", frozen: Sequence[int] = ()
) -> ModelSignature:
    """Flat parameters of these sizes in group 0; those whose index is in `frozen` belong to no group."""
    params = tuple(
        ParamSpec(name=f"p{i}", shape=(n,), dtype=dtype, group=NO_GROUP if i in frozen else 0)
        for i, n in enumerate(sizes)
    )
    return ModelSignature(params=params, optimizer=optimizer)


def shard_map(
    model: ModelSignature,
    *,
    epoch: int = 1,
    initialised_by: int | None = None,
    shard_bytes: int = 1024,
    holders: Sequence[int] | None = None,
    shard_epoch: int = 1,
) -> ShardMap:
    """All shards on `SERVER`, unless `holders` says otherwise (index = shard id)."""
    count = len(make_plan(model, shard_bytes).shards)
    owners = holders if holders is not None else [SERVER] * count
    return ShardMap(
        epoch=epoch,
        signature=model,
        shard_bytes=shard_bytes,
        holders=tuple(
            Holder(shard=ShardId(i), epoch=shard_epoch, incarnation=Incarnation(owner))
            for i, owner in enumerate(owners)
        ),
        servers=(ServerPeer(incarnation=SERVER, name="s1", address=""),),
        initialised_by=Incarnation(initialised_by) if initialised_by is not None else None,
    )


def admitted(*incarnations: int, role: Role = Role.WORKER) -> list[Admitted]:
    """Members that may call, all with `SECRET`."""
    return [Admitted(incarnation=Incarnation(number), role=role, secret=SECRET) for number in incarnations]


@dataclass(slots=True)
class Answered:
    """Collects the answers to one request."""

    replies: list[tuple[Reply, Tensor]] = field(default_factory=list)

    def __call__(self, reply: Reply, payload: Tensor) -> None:
        self.replies.append((reply, payload))

    @property
    def reply(self) -> Reply:
        """The one reply."""
        assert len(self.replies) == 1, f"{len(self.replies)} answers"
        return self.replies[0][0]

    @property
    def payload(self) -> Tensor:
        """The one payload."""
        assert len(self.replies) == 1, f"{len(self.replies)} answers"
        return self.replies[0][1]

    @property
    def statuses(self) -> list[Status]:
        """Of each shard."""
        assert not self.reply.refused, self.reply.refused
        return [shard.status for shard in self.reply.shards]

    @property
    def waiting(self) -> bool:
        """Whether there is no answer yet."""
        return not self.replies


class Client:
    """One worker's calls to one host, message by message."""

    def __init__(self, host: Host, the_map: ShardMap, incarnation: int, *, lr: float = 1.0) -> None:
        self.host = host
        self.map = the_map
        self.plan: ShardingPlan = make_plan(the_map.signature, the_map.shard_bytes)
        self.caller = Caller(incarnation=Incarnation(incarnation), secret=SECRET, map_epoch=the_map.epoch)
        group = getattr(torch.optim, the_map.signature.optimizer)([torch.zeros(1)], lr=lr).param_groups[0]
        self.groups: tuple[Hyper, ...] = (hyper(group, served(the_map.signature.optimizer)),)
        self.base = Version(1, 0)

    @property
    def all(self) -> list[ShardId]:
        """Ids of all trained shards."""
        return [shard.id for shard in self.plan.shards if shard.group != NO_GROUP]

    def submit(self, request: Request, payload: Tensor | None = None) -> Answered:
        """Any request."""
        answered = Answered()
        self.host.submit(request, torch.empty(0, dtype=torch.uint8) if payload is None else payload, answered)
        return answered

    def payload(self, value: float, shards: Sequence[int]) -> Tensor:
        """Every element of these shards set to `value`, padding too."""
        ids = [ShardId(shard) for shard in shards]
        dtype = getattr(torch, self.plan.shards[ids[0]].dtype)
        size = payload_bytes(self.plan, ids)
        return torch.full((size // dtype.itemsize,), value, dtype=dtype).view(torch.uint8)

    def init(self, value: float, shards: Sequence[int] | None = None) -> Answered:
        """Write initial weights, all equal to `value`."""
        ids = shards if shards is not None else [shard.id for shard in self.plan.shards]
        request = Init(caller=self.caller, shards=tuple((ShardId(shard), 1) for shard in ids))
        return self.submit(request, self.payload(value, ids))

    def load(self, value: float, shards: Sequence[int] | None = None) -> Answered:
        """Replace the weights, all by `value`."""
        ids = list(shards if shards is not None else self.all)
        request = Load(caller=self.caller, shards=tuple((ShardId(shard), 1) for shard in ids))
        return self.submit(request, self.payload(value, ids))

    def hello(self, shards: Sequence[int] | None = None) -> Answered:
        """Ask for versions and next push numbers."""
        return self.submit(Hello(caller=self.caller, shards=tuple((ShardId(s), 1) for s in shards or self.all)))

    def pull(self, shards: Sequence[int] | None = None, base: Version | None = None) -> Answered:
        """Ask for weights."""
        return self.submit(self.pull_request(shards, base))

    def pull_request(self, shards: Sequence[int] | None = None, base: Version | None = None) -> Pull:
        """The request of `pull`."""
        rows = tuple((ShardId(shard), 1, base) for shard in (shards if shards is not None else self.all))
        return Pull(caller=self.caller, shards=rows)

    def push(
        self,
        sequence: int,
        value: float = 1.0,
        shards: Sequence[int] | None = None,
        *,
        base: Version | None = None,
        present: bool = True,
        poll: bool = False,
    ) -> Answered:
        """Push gradients, all equal to `value`."""
        ids = list(shards if shards is not None else self.all)
        request = self.push_request(sequence, ids, base=base, present=present, poll=poll)
        return self.submit(request, None if poll or not present else self.payload(value, ids))

    def push_request(
        self,
        sequence: int,
        shards: Sequence[int],
        *,
        base: Version | None = None,
        present: bool = True,
        poll: bool = False,
    ) -> Push:
        """The request of `push`."""
        parts = tuple(
            ShardPush(
                shard=ShardId(shard),
                shard_epoch=1,
                base=base or self.base,
                present=_bitmap(len(self.plan.shards[shard].pieces), present),
            )
            for shard in shards
        )
        return Push(caller=self.caller, sequence=sequence, samples=1, groups=self.groups, shards=parts, poll=poll)

    def weights(self, payload: Tensor, shards: Sequence[int] | None = None) -> list[float]:
        """The first weight of each shard in a reply."""
        found: list[float] = []
        at = 0
        for shard in shards if shards is not None else self.all:
            spec = self.plan.shards[shard]
            part = payload[at : at + spec.nbytes].view(getattr(torch, spec.dtype))
            found.append(part[0].item())
            at += spec.nbytes
        return found


def _bitmap(pieces: int, present: bool) -> bytes:
    bits = (1 << pieces) - 1 if present else 0
    return bits.to_bytes((pieces + 7) // 8, "little")


def started(
    *sizes: int, workers: Sequence[int] = (10,), value: float = 0.0, optimizer: str = "SGD", host: Host | None = None
) -> tuple[Host, Client]:
    """A host with an initialised model, and its first worker."""
    host = host or Host(exact=True)
    model = signature(*(sizes or (300, 300)), optimizer=optimizer)
    host.install_members(admitted(*workers))
    before = shard_map(model)
    host.install_map(before, SERVER)
    client = Client(host, before, workers[0])
    assert client.init(value).statuses
    after = shard_map(model, epoch=2, initialised_by=workers[0])
    host.install_map(after, SERVER)
    return host, Client(host, after, workers[0])
