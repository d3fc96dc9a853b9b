"""Groups of child processes that take steps together: ours, the baselines, and the machine's limits."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from harness import Sample, busy_s
from links import Link
from processes import Child, Children

SAME_HOST = ("uv", "cma,basic")
"""TensorPipe's transports and channels where both ends share a host: payloads are copied from process to process."""

TORCH_DEFAULT = ("shm,uv", "cma,basic")
"""What torch RPC takes on one host when it is left to itself. Its `shm` threads poll all the time, also when idle."""

TCP = ("uv", "basic")

SOCKETS = "raw socket, both ways (limit)"
COPIES = "memcpy, twice (limit)"
DDP_FLAT = "gloo allreduce, flat"
DDP_TENSORS = "DDP over gloo"
RPC_BULK = "one bulk RPC each way"
RPC_EACH = "one RPC per parameter"
OURS = "torch-ps"


def same_host(name: str) -> str:
    """The name of a contender that uses shared memory."""
    return f"{name}, same host"


@dataclass(frozen=True, slots=True)
class Model:
    """What is moved in each step."""

    mb: float
    tensors: int = 60

    @property
    def numel(self) -> int:
        """Elements of each tensor, so that all together are about `mb` * 1e6 bytes of float32."""
        return max(1, int(self.mb * 1e6 / 4 / self.tensors))

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return 4 * self.tensors * self.numel

    @property
    def flags(self) -> tuple[object, ...]:
        """Arguments of drivers."""
        return "--numel", self.numel, "--tensors", self.tensors


class Group:
    """A contender made of children. `actors` take steps at the same time; `servers` only serve."""

    def __init__(
        self,
        name: str,
        link: Link,
        nbytes: int,
        actors: Sequence[Child],
        *,
        servers: Sequence[Child] = (),
        others: Sequence[Child] = (),
        workers: int = 1,
        freeze: bool = False,
    ) -> None:
        """`freeze`: stop all processes between turns, because they use processor time when they have nothing to do."""
        self.name = name
        self.actors = list(actors)
        self.servers = list(servers)
        self._everybody = [*actors, *servers, *others]
        self._link = link
        self._nbytes = nbytes
        self._workers = workers
        self._steps = 0
        self._timeout_s = 180.0
        self._freeze = freeze

    def wait_ready(self) -> None:
        """Until all actors can take steps."""
        for actor in self.actors:
            actor.answer(self._timeout_s)
        self._freeze_all()

    def run(self, steps: int, **command: object) -> Sample:
        """See `Contender.run`. `command`: more for the actors."""
        with self._thawed():
            return self._run(steps, command)

    def _run(self, steps: int, command: Mapping[str, object]) -> Sample:
        before = self._reading()
        began = time.perf_counter()
        for actor in self.actors:
            actor.tell(run=steps, **command)
        seconds = [_number(actor.answer(self._timeout_s), "seconds") for actor in self.actors]
        wall_s = time.perf_counter() - began
        used = _Reading(*(now - then for now, then in zip(self._reading(), before, strict=True)))
        self._steps += steps
        return Sample(
            steps=steps,
            seconds=max(seconds),
            bytes_moved=2 * self._nbytes * steps * self._workers,
            cpu_s=used.cpu_s,
            crossed_bytes=int(used.crossed),
            other_cores=max(0.0, (used.busy_s - used.cpu_s) / wall_s),
            server_cpu_s=used.server_cpu_s,
        )

    def check(self) -> None:
        """See `Contender.check`."""
        with self._thawed():
            for actor in self.actors:
                actor.tell(check=self._steps * (self._workers if self.servers else 1))
                answer = actor.answer(self._timeout_s)
                if answer.get("ok") is not True:
                    raise RuntimeError(f"{self.name}: wrong weights after {self._steps} steps: {answer}")

    @contextmanager
    def _thawed(self) -> Iterator[None]:
        for child in self._everybody if self._freeze else ():
            child.thaw()
        try:
            yield
        finally:
            self._freeze_all()

    def _freeze_all(self) -> None:
        for child in self._everybody if self._freeze else ():
            child.freeze()

    def rss_bytes(self) -> tuple[int, int]:
        """Largest resident memory of an actor, and of a server."""
        return (
            max(child.rss_bytes() for child in self.actors),
            max((child.rss_bytes() for child in self.servers), default=0),
        )

    def _reading(self) -> _Reading:
        cpu_s = sum(child.cpu_s() for child in self._everybody)
        server_cpu_s = sum(child.cpu_s() for child in self.servers)
        return _Reading(cpu_s, server_cpu_s, self._link.bytes_crossed(), busy_s())


class _Reading(NamedTuple):
    """Counters before or after a run."""

    cpu_s: float
    server_cpu_s: float
    crossed: float
    busy_s: float


@dataclass(frozen=True)  # without slots: defaults are read from the class
class Shape:
    """How our job is set up."""

    servers: int = 1
    workers: int = 1
    transports: str = TCP[0]
    channels: str = TCP[1]
    message_bytes: int = 8 << 20
    shard_bytes: int = 0
    calls_in_flight: int = 4
    rpc_threads: int = 4
    apply_threads: int = 2

    def on_same_host(self) -> Shape:
        """The same with shared memory."""
        return replace(self, transports=SAME_HOST[0], channels=SAME_HOST[1])


def ours(children: Children, link: Link, model: Model, shape: Shape, name: str = OURS) -> Group:
    """A real job whose workers only step."""
    flags = [
        *model.flags, "--message-bytes", shape.message_bytes, "--calls-in-flight", shape.calls_in_flight,
        "--rpc-threads", shape.rpc_threads,
    ]  # fmt: skip
    return job(children, link, shape, model.nbytes, name, "worker", flags)


def job(
    children: Children, link: Link, shape: Shape, nbytes: int, name: str, driver: str, flags: Sequence[object]
) -> Group:
    """Coordinator and servers as `psctl` starts them, and workers that run a driver."""
    number = len(list(children.folder.glob("*.address")))
    address_file = children.folder / f"{number}.address"
    address_file.touch()
    coordinator = children.python(
        "-m", "ps", "coordinator", f"--host={link.far.ip}", "--port=0", f"--servers={shape.servers}",
        f"--state={children.folder / f'{number}.sqlite'}", f"--address-file={address_file}",
        f"--shard-bytes={shape.shard_bytes}", f"--transports={shape.transports}", f"--channels={shape.channels}",
        prefix=link.far.prefix,
    )  # fmt: skip
    address = _await_text(address_file, coordinator)
    threads = (f"--rpc-threads={shape.rpc_threads}", f"--apply-threads={shape.apply_threads}")
    servers = [
        children.python("-m", "ps", "server", f"--coordinator={address}", *threads, prefix=link.far.prefix)
        for _ in range(shape.servers)
    ]
    workers = [
        children.driver(driver, "--coordinator", address, *flags, prefix=link.near.prefix) for _ in range(shape.workers)
    ]
    return Group(name, link, nbytes, workers, servers=servers, others=[coordinator], workers=shape.workers)


def torch_rpc(children: Children, link: Link, model: Model, mode: str, name: str, on: tuple[str, str] = TCP) -> Group:
    """A baseline on torch RPC; see `drivers/torch_rpc.py` for the modes."""
    flags = (*model.flags, "--transports", on[0], "--channels", on[1])
    server = children.driver("torch_rpc", "server", "--interface", link.far.interface, *flags, prefix=link.far.prefix)
    url = server.answer()["address"]
    client = children.driver(
        "torch_rpc", "client", "--interface", link.near.interface, "--url", url, "--mode", mode, *flags,
        prefix=link.near.prefix,
    )  # fmt: skip
    nbytes = 0 if mode == "empty" else model.nbytes
    return Group(name, link, nbytes, [client], servers=[server], freeze="shm" in on[0])


def gloo(children: Children, link: Link, model: Model, mode: str, name: str) -> Group:
    """A baseline of two workers over gloo; see `drivers/gloo.py`. Goodput by the same formula: twice the model's bytes
    per step, for one worker."""
    store = children.folder / f"{mode}-{model.mb}-{link.name}.store"
    ranks = [
        children.driver(
            "gloo", "--mode", mode, "--rank", rank, "--store", store, *model.flags,
            prefix=side.prefix, GLOO_SOCKET_IFNAME=side.interface,
        )
        for rank, side in enumerate((link.near, link.far))
    ]  # fmt: skip
    return Group(name, link, model.nbytes, ranks)


def sockets(children: Children, link: Link, model: Model) -> Group:
    """The limit of one TCP connection; see `drivers/sockets.py`."""
    flags = ("--ip", link.far.ip, "--nbytes", model.nbytes)
    server = children.driver("sockets", "server", *flags, prefix=link.far.prefix)
    port = server.answer()["address"]
    client = children.driver("sockets", "client", *flags, "--port", port, prefix=link.near.prefix)
    return Group(SOCKETS, link, model.nbytes, [client], servers=[server])


def copies(children: Children, link: Link, model: Model) -> Group:
    """The limit of memory; see `drivers/memory_copy.py`."""
    return Group(COPIES, link, model.nbytes, [children.driver("memory_copy", "--nbytes", model.nbytes)])


def _await_text(path: Path, writer: Child, timeout_s: float = 60.0) -> str:
    deadline = time.monotonic() + timeout_s
    while not (text := path.read_text().strip()):
        if not writer.alive() or time.monotonic() > deadline:
            raise RuntimeError(f"{' '.join(writer.command[-8:])} did not say where it listens")
        time.sleep(0.02)
    return text


def _number(answer: dict[str, object], key: str) -> float:
    value = answer.get(key)
    if not isinstance(value, float):
        raise RuntimeError(f"expected {key}, got {answer}")
    return value
