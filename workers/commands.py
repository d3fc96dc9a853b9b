"""Command lines and environments of the launcher's children. Torch-free; pure but for reading the environment."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from ps import memory
from ps.types import Address
from workers import rundir

if TYPE_CHECKING:
    from workers.launch import LocalConfig

PSCTL = (sys.executable, "-P", "-m", "workers")
"""`psctl` without relying on PATH. With -P the current folder stays off sys.path: a user's `workers.py` lives there."""


class Names(NamedTuple):
    """Names of the members that a launcher starts."""

    servers: tuple[str, ...]
    workers: tuple[str, ...]


def names(servers: int, workers: int) -> Names:
    """`server-0`, ..., `worker-0`, ...: also the names of the log files."""
    return Names(tuple(f"server-{n}" for n in range(servers)), tuple(f"worker-{n}" for n in range(workers)))


def coordinator(config: LocalConfig, folder: Path) -> list[str]:
    """A coordinator on any free port of loopback, which stays until the model is exported."""
    command = [*PSCTL, "coordinator", "--host=127.0.0.1", "--port=0", "--hold"]
    command += [f"--state={folder / rundir.STATE}", f"--address-file={folder / rundir.COORDINATOR}"]
    command += [f"--summary-file={folder / rundir.SUMMARY}", f"--servers={config.servers}"]
    command += [f"--min-workers={config.workers}", f"--consistency={config.consistency}"]
    command += [f"--shard-bytes={config.shard_bytes}"] + ["--exact"] * config.exact
    return [*command, f"--channels={','.join(_channels())}"]


def _channels() -> tuple[str, ...]:
    """TensorPipe's channels for members that share this host for sure: nobody else reaches a coordinator on loopback.

    `cma` copies payloads from process to process. Each process probes whether it may, as in a container whose rules
    forbid `process_vm_readv`, and two processes of which one may not use `basic`.
    """
    return ("cma", "basic") if sys.platform == "linux" else ("basic",)


def server(address: Address, name: str) -> list[str]:
    """A server."""
    return [*PSCTL, "server", f"--coordinator={address}", f"--name={name}"]


def worker(address: Address, name: str, error_file: Path, config: LocalConfig) -> list[str]:
    """A worker that runs the script."""
    flags = [f"--coordinator={address}", f"--name={name}", f"--error-file={error_file}"]
    return [*PSCTL, "worker", *flags, str(config.script), *config.arguments]


def export(address: Address, output: Path) -> list[str]:
    """The export of the model."""
    return [*PSCTL, "export", f"--coordinator={address}", f"--output={output}"]


def environment(address: Address | None, processes: int) -> dict[str, str]:
    """This process's environment with what children need; what the user has set wins over defaults.

    `processes`: how many of them compute; they share the cores.
    """
    env = dict(os.environ)
    env |= memory.settings(env)
    env["PYTHONUNBUFFERED"] = "1"  # logs are files, and lines should be seen when they are printed
    env.setdefault("OMP_NUM_THREADS", str(max(1, len(os.sched_getaffinity(0)) // processes)))
    env.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    env.setdefault("GRPC_VERBOSITY", "ERROR")
    for name in ("PS_COORDINATOR", "PS_NAME", "PS_ADVERTISE", "PS_INTERFACE"):
        env.pop(name, None)  # of another job, perhaps
    if address is not None:
        env["PS_COORDINATOR"] = str(address)
    return env
