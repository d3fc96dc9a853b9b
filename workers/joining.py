"""`workers.join`: finds the job, or makes one here; this process is a worker of it, or one rank of a worker."""

from __future__ import annotations

import multiprocessing

from torch import distributed

from ps.errors import ConfigError
from workers import registry
from workers.backend import Backend
from workers.config import WorkerConfig, load
from workers.group import GroupWorker
from workers.meet import meet
from workers.ranks import Ranks
from workers.worker import Worker


def join(coordinator: str | None = None, *, name: str = "", advertise: str = "", interface: str = "") -> Worker:
    """Join the job of `coordinator` (`host:port`), of `$PS_COORDINATOR`, or, with neither, be alone in this process.

    Returns fast: connections to servers are opened by `attach`. `name` is for status and logs; `advertise` and
    `interface` say which address or network interface the data plane uses, by default the one that routes to the
    coordinator. Raises `ConfigError` for a bad address, `CoordinatorLost` when nobody answers within
    `$PS_JOIN_TIMEOUT_S` (60 s).

    After `torch.distributed.init_process_group` all its ranks together are one worker: each calls this, and whatever
    else it calls of the worker, in the same order as the others. See `workers.group`.
    """
    if getattr(multiprocessing.current_process(), "_inheriting", False):  # as multiprocessing tells it to itself
        raise ConfigError(
            "join() was called while a new process imports the script, for example as a data loader's process: the "
            'script must start its work under `if __name__ == "__main__":`'
        )
    config = load(coordinator, name=name, advertise=advertise, interface=interface)
    before = registry.current()
    if config.coordinator is not None and before is not None and not before.alone:
        raise ConfigError(f"this process has joined already, as {before.name}: one worker per process")
    worker = _join_together(config) if _in_group(config) else _start(_backend(config), config)
    registry.remember(worker)
    return worker


def _in_group(config: WorkerConfig) -> bool:
    """Whether this process is a rank of a worker."""
    if distributed.is_available() and distributed.is_initialized():
        return distributed.get_world_size() > 1
    if config.launched_ranks > 1:
        raise ConfigError(
            f"join() was called before init_process_group(), in one of {config.launched_ranks} processes that torchrun "
            "has started (WORLD_SIZE, RANK): call torch.distributed.init_process_group() first, and they are one "
            "worker together. For workers of their own, start each without torchrun"
        )
    return False


def _join_together(config: WorkerConfig) -> Worker:
    ranks = meet(config)
    try:
        backend = _backend(config) if ranks.leads else None
        return _start(backend, config, ranks)
    except BaseException:
        ranks.close()
        raise


def _start(backend: Backend | None, config: WorkerConfig, ranks: Ranks | None = None) -> Worker:
    try:
        if ranks is not None:
            return GroupWorker(ranks, backend, config)
        assert backend is not None
        return Worker(backend, config)
    except BaseException:
        if backend is not None:
            backend.control.close()
            backend.close()
        raise


def _backend(config: WorkerConfig) -> Backend:
    if config.coordinator is None:
        from ps.alone import LocalJob  # loads the servers' side, which a cluster's worker never needs

        return LocalJob().member()
    from workers.cluster import Cluster  # loads gRPC and the RPC agent

    return Cluster(config)
