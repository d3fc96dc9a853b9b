"""A real coordinator in a thread of this process, and members that note what they hear."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import pickle
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

from ps.config import CoordinatorConfig
from ps.consistency.policy import Ruling
from ps.control.api import Admitted, Joined, ServerProgress, ShardMap, WorkerProgress
from ps.control.client import GrpcControl
from ps.control.server import Coordinator
from ps.control.state import CoordinatorState
from ps.types import Address, JobState, Role
from tests.support.polling import assert_eventually

T = TypeVar("T")

ROOT = Path(__file__).parents[2]

BOUND_S = 20.0
"""Longest wait in these tests; only a failure takes that long."""


class RunningCoordinator:
    """Serves from construction to `close`. `result` is its exit code once the job has ended."""

    def __init__(self, config: CoordinatorConfig) -> None:
        self.config = config
        self.result: int | None = None
        self._failure: BaseException | None = None
        self._started = threading.Event()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._main, name="test-coordinator")
        self._thread.start()
        assert self._started.wait(BOUND_S)
        if self._failure is not None:
            self._thread.join(BOUND_S)
            raise self._failure

    @property
    def address(self) -> Address:
        """Where it listens."""
        assert self._coordinator.address is not None
        return self._coordinator.address

    def do(self, event: Callable[[CoordinatorState, float], T]) -> T:
        """Run something on the state, on the coordinator's own thread."""
        engine = self._coordinator.engine
        coroutine = engine.do(lambda now: event(engine.state, now))
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(BOUND_S)

    def wait(self) -> int:
        """Until the job has ended and the coordinator with it; its exit code."""
        self._thread.join(BOUND_S)
        assert not self._thread.is_alive(), "the coordinator did not end"
        assert self.result is not None
        return self.result

    def close(self) -> None:
        """Stop it as a kill would: nobody is told."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._main_task.cancel)
        self._thread.join(BOUND_S)
        assert not self._thread.is_alive()

    def _main(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._main_task = self._loop.create_task(self._serve())
            self._loop.run_until_complete(self._main_task)
        except asyncio.CancelledError:
            pass
        except BaseException as error:
            self._failure = error
        finally:
            self._started.set()
            self._loop.run_until_complete(self._loop.shutdown_asyncgens())
            asyncio.set_event_loop(None)
            self._loop.close()
            del self._coordinator
            gc.collect()  # gRPC ends its polling thread with the last of its objects, and they form cycles

    async def _serve(self) -> None:
        self._coordinator = Coordinator(self.config)
        await self._coordinator.start()
        try:
            self._started.set()
            self.result = await self._coordinator.wait()
        finally:
            closing = asyncio.ensure_future(self._coordinator.close())
            while not closing.done():
                with contextlib.suppress(asyncio.CancelledError):  # `close` may come while it ends by itself
                    await asyncio.shield(closing)


def config_in(
    folder: Path,
    *,
    port: int = 0,
    servers: int = 1,
    hold: bool = False,
    heartbeat_s: float = 0.1,
    lease_s: float = 10.0,
    lost_coordinator_s: float = 10.0,
) -> CoordinatorConfig:
    """A configuration with quick heartbeats; state, summary and address file in `folder`."""
    return CoordinatorConfig(
        port=port,
        state=folder / "state.db",
        summary_file=folder / "summary.json",
        address_file=folder / "address",
        servers=servers,
        hold=hold,
        heartbeat_s=heartbeat_s,
        lease_s=lease_s,
        lost_coordinator_s=lost_coordinator_s,
    )


@contextlib.contextmanager
def coordinator(
    folder: Path, *, port: int = 0, hold: bool = False, heartbeat_s: float = 0.1, lease_s: float = 10.0
) -> Iterator[RunningCoordinator]:
    """A coordinator in a thread; see `config_in`."""
    running = RunningCoordinator(config_in(folder, port=port, hold=hold, heartbeat_s=heartbeat_s, lease_s=lease_s))
    try:
        yield running
    finally:
        running.close()


class CoordinatorProcess:
    """A coordinator in a process of its own, to be killed, frozen and interrupted."""

    def __init__(self, config: CoordinatorConfig) -> None:
        file = config.address_file
        assert file is not None
        file.unlink(missing_ok=True)
        code = (
            "import pickle, sys; from ps.control.server import run_coordinator; "
            "sys.exit(run_coordinator(pickle.loads(bytes.fromhex(sys.argv[1]))))"
        )
        self.process = subprocess.Popen([sys.executable, "-c", code, pickle.dumps(config).hex()], cwd=ROOT)
        try:
            assert_eventually(lambda: file.exists() or self.process.poll() is not None)
            self.address = Address.parse(file.read_text())
        except BaseException:
            self.kill()
            raise

    def __enter__(self) -> CoordinatorProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def kill(self) -> None:
        """SIGKILL, and reap it."""
        self.process.kill()
        self.process.wait(BOUND_S)


class Heard:
    """A listener that notes the news and lets tests wait for them."""

    def __init__(self, progress: WorkerProgress | ServerProgress | None = None) -> None:
        self.told = progress or WorkerProgress()
        self.admitted: tuple[Admitted, ...] = ()
        self.map: ShardMap | None = None
        self.job: tuple[JobState, str, bool] = (JobState.WAITING, "", False)
        self.fenced = self.lost = self.drained = ""
        self._changed = threading.Condition()

    def on_membership(self, version: int, admitted: tuple[Admitted, ...]) -> tuple[int, ...]:
        self._note(admitted=admitted)
        return ()

    def on_rulings(self, rulings: tuple[Ruling, ...]) -> None:
        """See `SessionListener.on_rulings`."""

    def on_shard_map(self, shard_map: ShardMap) -> None:
        self._note(map=shard_map)

    def on_job(self, state: JobState, reason: str, release: bool) -> None:
        self._note(job=(state, reason, release))

    def on_drain(self, reason: str) -> None:
        self._note(drained=reason)

    def on_fenced(self, reason: str) -> None:
        self._note(fenced=reason)

    def on_lost(self, reason: str) -> None:
        self._note(lost=reason)

    def progress(self) -> WorkerProgress | ServerProgress:
        return self.told

    def wait_until(self, condition: Callable[[Heard], object]) -> None:
        """Until a condition on what was heard holds."""
        with self._changed:
            assert self._changed.wait_for(lambda: condition(self), BOUND_S), vars(self)

    def _note(self, **fields: object) -> None:
        with self._changed:
            for name, value in fields.items():
                setattr(self, name, value)
            self._changed.notify_all()


class Member:
    """A member with an open session. Use as a context manager."""

    def __init__(self, address: Address, role: Role, name: str = "", heard: Heard | None = None) -> None:
        self.heard = heard or Heard(ServerProgress() if role is Role.SERVER else WorkerProgress())
        self.control = GrpcControl(address)
        try:
            self.joined: Joined = self.control.join(role=role, name=name, timeout_s=BOUND_S)
            self.control.start_session(self.heard)
        except BaseException:
            self.control.close()
            raise

    def __enter__(self) -> Member:
        return self

    def __exit__(self, *_: object) -> None:
        self.control.close()

    def ready(self) -> Member:
        """Announce it; servers get a made-up address."""
        server = isinstance(self.heard.told, ServerProgress)
        self.control.ready(f"uv://127.0.0.1:{20000 + self.joined.incarnation}" if server else "")
        return self
