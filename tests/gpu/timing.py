"""How long gradients take to the host, and weights back: 100 MB in 60 tensors, and 1 MB in 5,000."""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable

import torch
from torch import nn

from ps.sharding.partition import make_plan
from ps.sharding.spec import ModelSignature, ParamSpec
from workers.buffers import ModelMemory
from workers.routing import Message


def milliseconds(call: Callable[[], object]) -> float:
    """Median of ten, the GPU idle before and after."""
    took = []
    for _ in range(12):
        torch.cuda.synchronize()
        start = time.perf_counter()
        call()
        torch.cuda.synchronize()
        took.append(1e3 * (time.perf_counter() - start))
    return statistics.median(took[2:])


def measure(tensors: int, elems: int) -> str:
    """One line."""
    params = [nn.Parameter(torch.randn(elems, device="cuda")) for _ in range(tensors)]
    grads = [torch.randn_like(param) for param in params]
    specs = tuple(ParamSpec(name=f"p{index}", shape=(elems,), dtype="float32", group=0) for index in range(tensors))
    plan = make_plan(ModelSignature(params=specs, optimizer="SGD"), 4 << 20)
    memory = ModelMemory(plan, params)
    ids = [shard.id for shard in plan.shards]
    messages = [Message.of(plan, ids[begin : begin + 2]) for begin in range(0, len(ids), 2)]
    outs = [memory.outgoing(message) for message in messages]
    stage = milliseconds(lambda: memory.stage_gradients(outs, grads))
    arrived = [out.payload.clone() for out in outs]

    def take_all() -> None:
        for message, payload in zip(messages, arrived, strict=True):
            memory.take(message, payload, list(message.shards))

    take = milliseconds(take_all)
    one_by_one = milliseconds(lambda: [grad.cpu() for grad in grads])
    total = tensors * elems * 4 / 1e6
    return (
        f"{total:6.1f} MB in {tensors:5d}: to the host {stage:7.2f} ms (tensor by tensor {one_by_one:7.2f}), "
        f"back {take:7.2f} ms"
    )


if __name__ == "__main__":
    sys.stdout.write("\n".join(measure(*size) for size in ((60, 416_667), (5000, 50))) + "\n")
