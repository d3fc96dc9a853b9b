"""What a worker needs of the model that it has attached."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from torch import Tensor

from workers.microbatches import MicroBatches


class Counts(Protocol):
    """Where the weights in the model stand."""

    @property
    def global_step(self) -> int:
        """Pushes by all workers that they hold."""
        ...

    @property
    def foreign_steps(self) -> int:
        """Those of them that are not this worker's own."""
        ...


class Attached(Protocol):
    """A model on the servers, and the optimizer that trains it."""

    @property
    def client(self) -> Counts:
        """Counts of the weights here."""
        ...

    @property
    def batches(self) -> MicroBatches:
        """Micro-batches that wait for a push."""
        ...

    def push(self, samples: int) -> None:
        """Push the gradients with the current hyper-parameters, and take the new weights."""
        ...

    def push_buffers(self) -> None:
        """Push buffers that have changed here since they were sent."""
        ...

    def pull(self) -> None:
        """Take the newest weights and buffers."""
        ...

    def load(self, state_dict: Mapping[str, object], *, strict: bool) -> None:
        """Take a state dict and write its weights to the servers."""
        ...

    def optimizer_state(self) -> dict[Tensor, dict[str, object]]:
        """The optimizer's state of each parameter that has any, from the servers."""
        ...

    def load_optimizer(self, state_dict: Mapping[str, Any]) -> None:
        """Write the state of a `state_dict` to the servers, and take its hyper-parameters."""
        ...

    def close(self) -> None:
        """End the line to the servers. Idempotent; bounded."""
        ...
