"""The worker side of torch-ps: join a job, attach a model, train on leased data.

Public names load on first use, so that `import workers` pulls in neither torch nor grpc.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from workers.data import Epoch as Epoch
    from workers.data import permutation as permutation
    from workers.joining import join as join
    from workers.lifecycle import WorkerDrained as WorkerDrained
    from workers.lifecycle import WorkerStopped as WorkerStopped
    from workers.worker import Worker as Worker

__all__ = ["Epoch", "Worker", "WorkerDrained", "WorkerStopped", "join", "permutation"]

_HOME = {
    "Epoch": "workers.data",
    "Worker": "workers.worker",
    "WorkerDrained": "workers.lifecycle",
    "WorkerStopped": "workers.lifecycle",
    "join": "workers.joining",
    "permutation": "workers.data",
}


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module 'workers' has no attribute {name!r}")
    value: object = getattr(import_module(_HOME[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
