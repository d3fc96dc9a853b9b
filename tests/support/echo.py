"""A `ShardHost` that behaves as the request's first shard id says; for tests of transports."""

from __future__ import annotations

import json
import queue
import threading
import weakref

import numpy as np
import torch
from torch import Tensor

from ps.rpc import payload as payloads
from ps.rpc import torch_private
from ps.rpc.transport import Answer
from ps.rpc.wire import Caller, Hello, Init, Pull, Push, Reply, Request, ShardPush, ShardReply, Status
from ps.types import Incarnation, ShardId, Version

ECHO = 0
"""Answer at once with the payload."""
ELSEWHERE = 1
"""Answer from another thread."""
REFUSE = 2
FENCE = 3
PARK = 4
"""Answer when RELEASE comes."""
RELEASE = 5
RAISE = 6
"""Break the contract by raising."""
TWICE = 7
"""Break the contract by answering twice."""
SECRET = 8
"""Answer with the secret that the caller showed as the payload."""
INFO = 9
"""Answer with the RRef counters, the numbers of parked requests and of pooled aliases in use, as JSON."""
UNOWNED = 10
"""Break the contract by answering with a slice of a larger buffer."""
BLOCK = 11
"""Break the contract by never returning (until `close`)."""

POOL = 12
"""As PARK; the answer is an alias of a pooled buffer, and the host keeps `answer` for ever."""


def push(mode: int, sequence: int = 0) -> Push:
    """A push of one shard that makes an `EchoHost` do `mode`."""
    shard = ShardPush(shard=ShardId(mode), shard_epoch=1, base=Version(1, 2), present=b"\x01")
    caller = Caller(incarnation=Incarnation(77), secret=b"", map_epoch=1)
    return Push(caller=caller, sequence=sequence, samples=4, groups=((("lr", 0.1),),), shards=(shard,))


class EchoHost:
    """Replies name the request's shards, with the version they asked about or (0, 0)."""

    def __init__(self) -> None:
        self.parked: list[tuple[Request, Tensor, Answer]] = []
        self._kept: list[Answer] = []
        self.pooled = torch.ones(32 << 20, dtype=torch.uint8)
        self.aliases_out = 0
        self.blocked = False
        self.unblock = threading.Event()
        self._queue: queue.SimpleQueue[tuple[Request, Tensor, Answer] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._serve, name="echo-host")
        self._thread.start()

    def submit(self, request: Request, payload: Tensor, answer: Answer) -> None:
        """See `ShardHost.submit`."""
        mode = _shards(request)[0][0] if _shards(request) else ECHO
        if mode in (ECHO, TWICE):
            for _ in range(1 + (mode == TWICE)):
                answer(reply_to(request), payload)
        elif mode == ELSEWHERE:
            self._queue.put((request, payload, answer))
        elif mode in (REFUSE, FENCE):
            answer(Reply(refused="not today\\ \u00e9", fenced=mode == FENCE), payloads.empty())
        elif mode in (PARK, POOL):
            self.parked.append((request, payload, answer))
        elif mode == RELEASE:
            self._release()
            answer(reply_to(request), payload)
        elif mode == SECRET:
            answer(reply_to(request), _bytes(request.caller.secret))
        elif mode == INFO:
            answer(reply_to(request), _bytes(json.dumps(self._info()).encode()))
        elif mode == UNOWNED:
            answer(reply_to(request), torch.zeros(100, dtype=torch.uint8)[10:20])
        elif mode == BLOCK:
            self.blocked = True
            self.unblock.wait(60)
        else:
            raise RuntimeError(f"mode {mode}")

    def close(self) -> None:
        """End the thread; parked requests stay unanswered."""
        self.unblock.set()
        self._queue.put(None)
        self._thread.join(10)

    def _release(self) -> None:
        parked, self.parked = self.parked, []
        for request, payload, answer in parked:
            pooled = _shards(request)[0][0] == POOL
            answer(reply_to(request), self._alias() if pooled else payload)
            if pooled:
                self._kept.append(answer)

    def _info(self) -> dict[str, str]:
        counts = {"aliases_out": self.aliases_out, "parked": len(self.parked), "blocked": self.blocked}
        return {**torch_private.debug_info(), **{key: str(value) for key, value in counts.items()}}

    def _alias(self) -> Tensor:
        alias = self.pooled.detach()
        self.aliases_out += 1
        weakref.finalize(alias, self._returned)
        return alias

    def _returned(self) -> None:
        self.aliases_out -= 1

    def _serve(self) -> None:
        while (item := self._queue.get()) is not None:
            request, payload, answer = item
            answer(reply_to(request), payload)


def reply_to(request: Request) -> Reply:
    """OK for each shard of `request`."""
    sequence = request.sequence + 1 if isinstance(request, Push) else 0
    return Reply(
        shards=tuple(
            ShardReply(shard=shard, status=Status.OK, version=version, next_sequence=sequence)
            for shard, version in _shards(request)
        )
    )


def _shards(request: Request) -> list[tuple[ShardId, Version]]:
    if isinstance(request, Push):
        return [(s.shard, s.base) for s in request.shards]
    if isinstance(request, Pull):
        return [(shard, base or Version(0, 0)) for shard, _, base in request.shards]
    assert isinstance(request, (Hello, Init))
    return [(shard, Version(0, 0)) for shard, _ in request.shards]


def _bytes(content: bytes) -> Tensor:
    return payloads.over(np.frombuffer(bytearray(content), dtype=np.uint8))
