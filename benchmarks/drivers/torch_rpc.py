"""Baselines on torch.distributed.rpc, the way tutorials do it: one server object, remote functions, plain tensors.

- `per_parameter`: one asynchronous RPC per parameter pushes its gradient; when all are done, one per parameter pulls.
- `bulk`: one RPC pushes all gradients as a list of tensors, one pulls all weights.
- `empty`: one RPC to a function that does nothing. `echo`: one RPC with the model as one flat tensor, there and back.

Members are added as our own processes do it, without `init_rpc`; what is measured is torch's own.
"""

from __future__ import annotations

import argparse
from typing import cast

import torch
from serve import say, serve, wait_for_end
from tensors import Tensors, edges
from torch import Tensor

from ps.rpc.torch_private import Agent, Peer, quiet_logs

TIMEOUT_S = 120.0

weights: list[Tensor] = []
"""The server's weights."""


def push(index: int, grad: Tensor) -> None:
    """Apply one gradient."""
    weights[index].add_(grad, alpha=-0.1)


def pull(index: int) -> Tensor:
    """One parameter's weights."""
    return weights[index]


def push_all(grads: list[Tensor]) -> None:
    """Apply all gradients."""
    torch._foreach_add_(weights, grads, alpha=-0.1)


def pull_all() -> list[Tensor]:
    """All weights."""
    return weights


def nothing() -> None:
    """The least that an RPC can do."""


def echo(value: Tensor) -> Tensor:
    """There and back."""
    return value


class Client:
    """The worker's side."""

    def __init__(self, agent: Agent, peer: Peer, numel: int, tensors: int) -> None:
        self._agent = agent
        self._peer = peer
        self._model = Tensors(numel, tensors)
        self._values = [value.detach() for value in self._model.values]
        self._grads = [torch.ones_like(value) for value in self._values]
        self._flat = torch.ones(sum(value.numel() for value in self._values))

    def per_parameter(self) -> None:
        """All pushes at once; when they are done, all pulls at once."""
        pushes = [self._agent.call(self._peer, push, item, TIMEOUT_S) for item in enumerate(self._grads)]
        for future in pushes:
            future.wait()
        pulls = [self._agent.call(self._peer, pull, (index,), TIMEOUT_S) for index in range(len(self._values))]
        for value, future in zip(self._values, pulls, strict=True):
            value.copy_(future.wait())

    def bulk(self) -> None:
        """One push, then one pull."""
        self._agent.call(self._peer, push_all, (self._grads,), TIMEOUT_S).wait()
        weights = self._agent.call(self._peer, pull_all, (), TIMEOUT_S).wait()
        torch._foreach_copy_(self._values, cast("list[Tensor]", weights))

    def empty(self) -> None:
        """One round trip."""
        self._agent.call(self._peer, nothing, (), TIMEOUT_S).wait()

    def echo(self) -> None:
        """One round trip with the model's bytes both ways."""
        self._agent.call(self._peer, echo, (self._flat,), TIMEOUT_S).wait()

    def check(self, steps: int) -> object:
        """The weights after `steps` steps."""
        return edges(self._values)


def make_agent(options: argparse.Namespace, name: str, id: int) -> Agent:
    """The process's RPC agent."""
    quiet_logs()
    return Agent(
        name=name, id=id, interface=options.interface, transports=tuple(options.transports.split(",")),
        channels=tuple(options.channels.split(",")), threads=options.threads,
    )  # fmt: skip


def main() -> None:
    """Run one side."""
    parser = argparse.ArgumentParser()
    parser.add_argument("side", choices=["server", "client"])
    parser.add_argument("--interface", required=True)
    parser.add_argument("--url", default="")
    parser.add_argument("--mode", default="bulk", choices=["per_parameter", "bulk", "empty", "echo"])
    parser.add_argument("--numel", type=int, required=True, help="elements of each tensor")
    parser.add_argument("--tensors", type=int, required=True)
    parser.add_argument("--transports", default="uv")
    parser.add_argument("--channels", default="basic")
    parser.add_argument("--threads", type=int, default=4)
    options = parser.parse_args()
    if options.side == "server":
        weights.extend(value.detach() for value in Tensors(options.numel, options.tensors).values)
        agent = make_agent(options, "server", 1)
        say(address=agent.url)
        wait_for_end()
    else:
        agent = make_agent(options, "client", 2)
        client = Client(agent, agent.add("peer", 20000, options.url), options.numel, options.tensors)
        step = getattr(client, options.mode)
        idle = options.mode in ("empty", "echo")
        serve(step, (lambda steps: -0.1 * steps) if idle else client.check)
    agent.shutdown()


if __name__ == "__main__":
    main()
