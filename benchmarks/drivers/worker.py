"""Ours: one worker of a real job, with a real optimizer attached; a step is `optimizer.step()` and nothing else."""

from __future__ import annotations

import argparse

import torch
from serve import serve
from tensors import Tensors

from ps.types import Address
from workers.cluster import Cluster
from workers.config import WorkerConfig
from workers.worker import Worker


def main() -> None:
    """Join, attach, serve steps, leave."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--coordinator", type=Address.parse, required=True)
    parser.add_argument("--numel", type=int, required=True, help="elements of each tensor")
    parser.add_argument("--tensors", type=int, required=True)
    parser.add_argument("--message-bytes", type=int, default=WorkerConfig().message_bytes)
    parser.add_argument("--calls-in-flight", type=int, default=WorkerConfig().calls_in_flight)
    parser.add_argument("--rpc-threads", type=int, default=WorkerConfig().rpc_threads)
    options = parser.parse_args()
    config = WorkerConfig(
        coordinator=options.coordinator,
        message_bytes=options.message_bytes,
        calls_in_flight=options.calls_in_flight,
        rpc_threads=options.rpc_threads,
    )
    model = Tensors(options.numel, options.tensors)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Worker(Cluster(config), config) as worker:
        worker.attach(model, optimizer)
        model.set_gradients()

        def check(steps: int) -> object:
            worker.pull()
            return model.edges()

        serve(optimizer.step, check)


if __name__ == "__main__":
    main()
