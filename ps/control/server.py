"""The coordinator process: replay the journal, serve, tick, and end with the job.

One event loop and one commit thread. The process ends when the job is over and released and its members have left (or
had time to), or by a signal.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import socket
import sqlite3
import threading
from pathlib import Path

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from ps.clock import Clock, MonotonicClock
from ps.config import CoordinatorConfig
from ps.control import report
from ps.control.api import JobSettings
from ps.control.engine import Engine, wait_event
from ps.control.journal import Journal
from ps.control.line import MAX_MESSAGE_BYTES
from ps.control.records import Options
from ps.control.servicer import AdminServicer, CoordinatorServicer, self_status
from ps.control.state import CoordinatorState
from ps.errors import AddressError
from ps.types import Address, JobState
from ps.v1 import admin_pb2, admin_pb2_grpc, coordinator_pb2, coordinator_pb2_grpc
from ps.v1 import coordinator_pb2 as pb

logger = logging.getLogger(__name__)

MAX_GRACE_S = 10.0
"""How long members may take to leave after the release."""

EXIT_CODES = {JobState.FINISHED: 0, JobState.FAILED: 1, JobState.INTERRUPTED: 130}

_WILDCARDS = {"0.0.0.0": "127.0.0.1", "::": "::1"}


def run_coordinator(config: CoordinatorConfig) -> int:
    """Run the coordinator until the job has ended; returns the process's exit code.

    0 finished, 1 failed, 130 interrupted by SIGINT or SIGTERM (a second signal exits at once). On the main thread it
    handles these signals. Raises `ConfigError` for a state file or an address that can't be used.
    """
    return asyncio.run(_run(config))


async def _run(config: CoordinatorConfig) -> int:
    coordinator = Coordinator(config)
    loop, handled = asyncio.get_running_loop(), []
    await coordinator.start()
    try:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                loop.add_signal_handler(number, coordinator.on_signal, number)
                handled.append(number)
        return await coordinator.wait()
    finally:
        for number in handled:
            loop.remove_signal_handler(number)
        await coordinator.close()


def options_of(config: CoordinatorConfig) -> Options:
    """What the state needs of the configuration."""
    return Options(
        servers=config.servers,
        min_workers=config.min_workers,
        no_workers_s=config.no_workers_s,
        hold=config.hold,
        max_members=config.max_members,
        settings=JobSettings(
            consistency=config.consistency,
            exact=config.exact,
            shard_bytes=config.shard_bytes,
            heartbeat_s=config.heartbeat_s,
            lease_s=config.lease_s,
            lost_coordinator_s=config.lost_coordinator_s,
            transports=config.transports,
            channels=config.channels,
        ),
    )


class Coordinator:
    """A serving coordinator. All methods belong to one event loop; `start`, then `wait`, then `close`."""

    def __init__(self, config: CoordinatorConfig, clock: Clock | None = None) -> None:
        self._config = config
        self._clock = clock or MonotonicClock()
        self._signals = 0
        self._leave_now = asyncio.Event()
        self._stopping: asyncio.Future[None] | None = None
        self._journal: Journal | None = None
        self._server: grpc.aio.Server | None = None
        self._engine: Engine | None = None
        self._ticker: asyncio.Task[None] | None = None
        self.address: Address | None = None
        """Where it listens, once started."""

    @property
    def engine(self) -> Engine:
        """The running state machine."""
        assert self._engine is not None, "not started"
        return self._engine

    async def start(self) -> None:
        """Replay, listen, and say where. Raises `ConfigError`; nothing is left open then."""
        try:
            self._journal = Journal(self._config.state)
            state = CoordinatorState(self._clock.now(), options_of(self._config), self._journal.start())
            self._engine = engine = Engine(state, self._journal, self._clock)
            self._server = await self._make_server(engine)
            port = self._bind(self._server)
            await self._server.start()
        except BaseException:
            await self.close()
            raise
        host = _WILDCARDS.get(self._config.host, self._config.host)
        self.address = Address(host, port)
        self._ticker = asyncio.create_task(self._tick(), name="ps-tick")
        if state.job.over:
            logger.warning(
                "the job in %s is over already (%s); a new job needs a new --state",
                self._config.state,
                state.job.state.value,
            )
        if self._config.address_file is not None:
            write_whole(self._config.address_file, f"{self.address}\n")
        logger.info(
            "coordinator listens on %s (generation %d)", Address(self._config.host, port), engine.state.generation
        )

    async def wait(self) -> int:
        """Until the job is over, released and left (or interrupted twice); writes the summary; the exit code."""
        state = self.engine.state
        while not (state.job.over and state.job.record.released) and not self._leave_now.is_set():
            await wait_event(self._leave_now, state.options.tick_s / 5)
        self._write_summary()
        until = self.engine.now() + min(MAX_GRACE_S, max(2.0, state.options.settings.lease_s))
        while self.engine.now() < until and any(not member.ended for member in state.members):
            if await wait_event(self._leave_now, state.options.tick_s / 5):
                break
        self._write_summary()
        return EXIT_CODES.get(state.job.state, 130)

    def on_signal(self, number: int) -> None:
        """First: the job ends as interrupted. Second: this process ends now."""
        self._signals += 1
        name = signal.Signals(number).name
        if self._signals > 1:
            logger.warning("second signal (%s): leaving now", name)
            self._leave_now.set()
            return
        logger.warning("%s: the job ends as interrupted; once more to leave at once", name)
        self._stopping = asyncio.ensure_future(self._interrupt(f"coordinator got {name}"))

    async def close(self) -> None:
        """Stop serving and let go of the state file; idempotent."""
        if self._ticker is not None:
            self._ticker.cancel()
            await asyncio.gather(self._ticker, return_exceptions=True)
            self._ticker = None
        if self._server is not None:
            await self._server.stop(grace=0.5)
            self._server = None
        if self._engine is not None:
            try:
                await self._engine.close()
            except sqlite3.Error as error:
                logger.error("the last records could not be written to %s: %s", self._config.state, error)
            self._engine = None
        if self._journal is not None:
            self._journal.close()
            self._journal = None

    async def _interrupt(self, reason: str) -> None:
        state = self.engine.state
        await self.engine.do(lambda now: state.stop(now, interrupted=True, reason=reason))
        # Whoever holds the end of the job to save results has been told to stop as well.
        await self.engine.do(state.release)

    async def _tick(self) -> None:
        state = self.engine.state
        never = asyncio.Event()
        while True:
            try:
                await self.engine.do(state.tick)
            except sqlite3.Error as error:
                logger.error("%s can't be written: %s", self._config.state, error)
            await wait_event(never, state.options.tick_s)

    async def _make_server(self, engine: Engine) -> grpc.aio.Server:
        server = grpc.aio.server(options=_server_options(self._config.lease_s))
        coordinator_pb2_grpc.add_CoordinatorServicer_to_server(CoordinatorServicer(engine, self._myself), server)
        admin_pb2_grpc.add_AdminServicer_to_server(AdminServicer(engine), server)
        names = [
            coordinator_pb2.DESCRIPTOR.services_by_name["Coordinator"].full_name,
            admin_pb2.DESCRIPTOR.services_by_name["Admin"].full_name,
        ]
        checks = health.aio.HealthServicer()  # type: ignore[attr-defined]  # not in the stubs
        health_pb2_grpc.add_HealthServicer_to_server(checks, server)
        for name in ("", *names):
            await checks.set(name, health_pb2.HealthCheckResponse.SERVING)
        reflection.enable_server_reflection((*names, health.SERVICE_NAME, reflection.SERVICE_NAME), server)
        return server

    def _bind(self, server: grpc.aio.Server) -> int:
        config = self._config
        host = f"[{config.host}]" if ":" in config.host else config.host
        try:
            port = server.add_insecure_port(f"{host}:{config.port}")
        except RuntimeError:
            port = 0
        if not port:
            what = f"port {config.port} on {config.host}" if config.port else f"a free port on {config.host}"
            raise AddressError(
                f"the coordinator can't listen on {what}: {_why_not(config.host, config.port)}; "
                "choose another --port (0 = any free one) or --host"
            )
        return port

    def _myself(self) -> pb.MemberStatus:
        return self_status(
            name="coordinator", pid=os.getpid(), host=socket.gethostname(), address=str(self.address or "")
        )

    def _write_summary(self) -> None:
        if self._config.summary_file is None:
            return
        content = report.summary(self.engine.state, self.engine.now())
        write_whole(self._config.summary_file, json.dumps(content, indent=2) + "\n")


def write_whole(path: Path, text: str) -> None:
    """Write a file so that readers see nothing or all of it."""
    part = path.with_name(f".{path.name}.{os.getpid()}")
    part.write_text(text)
    part.replace(path)


def _server_options(lease_s: float) -> list[tuple[str, int]]:
    # A frozen process keeps its TCP connection: unanswered pings within a lease's time end its session.
    ping_ms = int(max(0.5, lease_s / 2) * 1000)
    return [
        ("grpc.enable_http_proxy", 0),
        # Two coordinators on one port would each get some of the members.
        ("grpc.so_reuseport", 0),
        ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
        ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
        ("grpc.keepalive_time_ms", ping_ms),
        ("grpc.keepalive_timeout_ms", ping_ms),
        # Measured (gRPC 1.85): without this a ping that is not answered takes 60 s, whatever the line above says.
        ("grpc.http2.ping_timeout_ms", ping_ms),
        ("grpc.keepalive_permit_without_calls", 1),
        # Members ping every 5 s (ps.control.line); anything stricter here would answer "too many pings".
        ("grpc.http2.min_ping_interval_without_data_ms", 1000),
        ("grpc.http2.max_ping_strikes", 0),
        ("grpc.http2.max_pings_without_data", 0),
    ]


def _why_not(host: str, port: int) -> str:
    """What the system says about an address that gRPC could not bind; gRPC keeps it in its own log."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((host, port))
            probe.listen(1)
    except OSError as error:
        return error.strerror or str(error)
    return "gRPC could not bind it"
