"""`psctl local`: a whole cluster as child processes of one launcher. Torch-free.

The launcher starts a coordinator on a free port, then servers and workers; shows their logs and the job's progress;
reports each child's exit to the coordinator at once; at the end exports the model and lets everybody go. However it
ends, no process stays behind. Everything runs on the main thread but for the poll of the coordinator's status.
"""

from __future__ import annotations

import contextlib
import signal
import sys
from dataclasses import dataclass
from pathlib import Path

from ps.clock import Deadline, MonotonicClock
from ps.config import CoordinatorConfig
from ps.errors import ConfigError, PsError
from ps.types import Address
from ps.v1 import types_pb2
from ps.v1.coordinator_pb2 import StatusReply
from workers import commands, rundir
from workers.children import Child, Keeper, Wakeup, end_all
from workers.dashboard import Dashboard, open_dashboard
from workers.poller import Poller

EXIT_INTERRUPTED = 130

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

_OVER = (types_pb2.JOB_STATE_FINISHED, types_pb2.JOB_STATE_FAILED, types_pb2.JOB_STATE_INTERRUPTED)


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalConfig:
    """What `psctl local` needs."""

    script: Path
    arguments: tuple[str, ...] = ()
    servers: int = 1
    workers: int = 1
    consistency: str = "asp"
    exact: bool = False
    shard_bytes: int = 0
    run_dir: Path | None = None
    """None: `runs/<time>`, made unique."""
    listen_s: float = 60.0
    """How long the coordinator may take to listen."""
    grace_s: float = 15.0
    """How long workers may take to leave: a SIGTERM lets them finish their step first."""
    settle_s: float = 5.0
    """How long the coordinator may take to see the end of the job after the last worker has exited."""
    export_s: float = 300.0
    """How long the export of the model may take."""
    release_s: float = 15.0
    """How long servers and coordinator may take to exit once the job is over."""

    def __post_init__(self) -> None:
        # what the coordinator would refuse is refused here already, before anything is started
        CoordinatorConfig(
            state=Path(rundir.STATE), servers=self.servers, consistency=self.consistency, shard_bytes=self.shard_bytes
        )
        if self.workers < 1:
            raise ConfigError(f"--workers {self.workers} must be at least 1")
        if not self.script.is_file():
            raise ConfigError(f"there is no script {str(self.script)!r}")


class _KillNow(Exception):
    """A second signal: the user does not want to wait."""


def run(config: LocalConfig) -> int:
    """Run the job to its end; returns the exit code for the shell. Main thread only.

    0: the job finished and its model is exported. 130: interrupted. Else the exit code of the first script that failed,
    or 1. Raises `ConfigError` when the run folder can't be used.
    """
    folder = rundir.create(config.run_dir)
    with open_dashboard() as dashboard:
        launcher = Launcher(config, folder, dashboard)
        code = launcher.run()
    rundir.failures_into_logs(folder)
    rundir.ensure_summary(folder, launcher.outcome, launcher.reason)
    _say_goodbye(folder, launcher)
    return code


class Launcher:
    """One run of a local cluster. Main thread only; `run` may be called once."""

    def __init__(self, config: LocalConfig, folder: Path, dashboard: Dashboard) -> None:
        self._config = config
        self._folder = folder
        self._dashboard = dashboard
        self._clock = MonotonicClock()
        self._began_s = self._clock.now()
        self._signals = 0
        self._wakeup = Wakeup(dict.fromkeys(_SIGNALS, self._on_signal))
        self._children: list[Child] = []
        self._gone: set[str] = set()
        self._poller: Poller | None = None
        self._stopping: Deadline | None = None
        self._idle: Deadline | None = None
        self._told: Deadline | None = None
        self.outcome = "failed"
        self.reason = ""
        self.failure: rundir.Failure | None = None
        """The first script that failed."""

    def run(self) -> int:
        """See `run`."""
        with self._wakeup:
            self._keeper = Keeper()
            try:
                self._start()
                self._watch()
                return self._finish()
            except _KillNow:
                self.outcome, self.reason = "interrupted", "two signals: everything was killed"
                return EXIT_INTERRUPTED
            except PsError as error:
                self.reason = self.reason or str(error)
                return EXIT_INTERRUPTED if self.outcome == "interrupted" else 1
            finally:
                self._clean_up()

    # ---- start

    def _start(self) -> None:
        config, names = self._config, commands.names(self._config.servers, self._config.workers)
        self._spawn("coordinator", "coordinator", commands.coordinator(config, self._folder))
        address = self._coordinator_address()
        self._poller = Poller(address)
        for name in names.servers:
            self._spawn("server", name, commands.server(address, name), address)
        for name in names.workers:
            error_file = rundir.error_file(self._folder, name)
            self._spawn("worker", name, commands.worker(address, name, error_file, config), address)
        self._poller.start()

    def _spawn(self, role: str, name: str, command: list[str], address: Address | None = None) -> Child:
        env = commands.environment(address, self._config.servers + self._config.workers)
        child = Child(role, name, command, env, rundir.log_file(self._folder, name), self._keeper)
        self._children.append(child)
        return child

    def _coordinator_address(self) -> Address:
        """Wait for the coordinator to listen; raises `PsError` when it doesn't."""
        path, coordinator = self._folder / rundir.COORDINATOR, self._children[0]
        deadline = Deadline.after(self._clock, self._config.listen_s)
        while not deadline.expired(self._clock):
            self._tick(0.02)
            if self._signals:
                self.outcome = "interrupted"
                raise PsError("interrupted before the coordinator was up")
            with contextlib.suppress(OSError, ValueError):
                return Address.parse(path.read_text())
            if coordinator.exit_code is not None:
                raise PsError(f"the coordinator {_how(coordinator)} at its start; see {coordinator.log}")
        raise PsError(f"the coordinator did not listen within {self._config.listen_s:g} s; see {coordinator.log}")

    # ---- while it runs

    def _watch(self) -> None:
        """Until the job is over and the workers have left, or the coordinator is gone."""
        over: Deadline | None = None
        while True:
            self._tick(0.1)
            if self._signals and self._stopping is None:
                self._begin_stop()
            status = self._status()
            if self._child("coordinator").exit_code is not None:
                assert self._poller is not None
                self._poller.give_up()
                raise PsError(f"the coordinator {_how(self._child('coordinator'))} before the job was over")
            if status is not None and status.state in _OVER:
                over = over or self._exit_bound(status)
            if over is not None and (self._workers_gone() or over.expired(self._clock)):
                return
            if over is None and self._workers_gone():
                self._settle(status)
            if self._stopping is not None and self._stopping.expired(self._clock):
                end_all(self._workers(), self._wakeup, term_s=0)

    def _exit_bound(self, status: StatusReply) -> Deadline:
        """When workers must have exited after the end of the job. Scripts of a finished one may go on with what they
        like after they have left it; a failed or interrupted one ends its workers."""
        finished = status.state == types_pb2.JOB_STATE_FINISHED
        return Deadline.after(self._clock, float("inf") if finished else self._config.grace_s)

    def _tick(self, timeout_s: float) -> None:
        """Wait a little, show new log lines and progress, report exits. Raises `_KillNow` at the second signal."""
        self._wakeup.wait(timeout_s)
        if self._signals > 1:
            raise _KillNow
        for child in self._children:
            exited = child.poll() is not None
            for text in child.tail.lines(last=exited):
                self._dashboard.line(child.role, child.name, text)
            if exited and child.name not in self._gone:
                self._gone.add(child.name)
                self._on_exit(child)
        self._dashboard.update(self._status(), self._clock.now() - self._began_s)

    def _begin_stop(self) -> None:
        """First signal: workers finish their step and leave; `_settle` then ends the job."""
        self._dashboard.note("stopping: workers finish their step; again to kill everything now", style="yellow")
        self._stopping = Deadline.after(self._clock, self._config.grace_s)
        for child in self._workers():
            child.signal(signal.SIGTERM)

    def _settle(self, status: StatusReply | None) -> None:
        """All our workers have exited and the job is not over: end it, unless others still work on it. Raises `PsError`
        when the coordinator doesn't end it."""
        assert self._poller is not None
        if self._told is not None and self._told.expired(self._clock):
            self.outcome = "interrupted" if self._stopping else self.outcome
            raise PsError(
                f"the coordinator did not end the job within {self._config.grace_s:g} s of being told to; "
                f"see {self._child('coordinator').log}"
            )
        if self._stopping is not None:
            self._end_job(interrupted=True, reason="interrupted at the launcher")
            return
        self._idle = self._idle or Deadline.after(self._clock, self._config.settle_s)
        if status is not None and status.progress.workers_live and not self._poller.silent:
            self._idle = None  # started by hand, elsewhere
        elif self._idle.expired(self._clock):
            ends = ", ".join(f"{child.name} {_how(child)}" for child in self._workers())
            self._end_job(interrupted=False, reason=f"no worker is left: {ends}")

    def _end_job(self, *, interrupted: bool, reason: str) -> None:
        assert self._poller is not None
        self._told = self._told or Deadline.after(self._clock, self._config.grace_s)
        self._poller.stop_job(interrupted=interrupted, reason=reason)

    def _on_exit(self, child: Child) -> None:
        """Tell the coordinator, so that nobody waits for a lease to expire; end a job that can't go on."""
        if child.role in ("export", "coordinator") or self._poller is None or self._stopping is not None:
            return  # once we stop the job, its members leave because of that
        code = child.exit_code or 0
        over = self._over()
        if code < 0 and not over:
            self._dashboard.note(f"{child.name} {_how(child)}", style="red")
        self._poller.report_exit(child.name, child.pid, code)
        if not over and (child.role == "server" or code > 0):
            self._poller.stop_job(interrupted=False, reason=f"{child.name} {_how(child)}")

    # ---- the end

    def _finish(self) -> int:
        """Export, release, and the exit code."""
        status = self._status()
        assert status is not None and self._poller is not None
        self.outcome = {types_pb2.JOB_STATE_FINISHED: "finished", types_pb2.JOB_STATE_INTERRUPTED: "interrupted"}.get(
            status.state, "failed"
        )
        self.reason = status.reason
        end_all(self._workers(), self._wakeup, term_s=0)
        wanted = self.outcome == "finished" or (self.outcome == "interrupted" and status.progress.pushes > 0)
        exported = not (wanted and status.shards) or self._export()
        self._poller.release()
        joined = {member.name for member in status.members}
        for child in self._children:
            if child.role == "server" and child.name not in joined:
                child.signal(signal.SIGTERM)  # still on its way to a job that is over
        self._drain(self._config.release_s)
        if self.outcome == "finished":
            return 0 if exported else 1
        if self.outcome == "interrupted":
            return EXIT_INTERRUPTED
        self.failure = rundir.first_failure(self._folder, [child.name for child in self._workers()])
        codes = [child.exit_code for child in self._workers() if (child.exit_code or 0) > 0]
        return (self.failure.exit_code if self.failure else 0) or status.exit_code or next(iter(codes), 0) or 1

    def _export(self) -> bool:
        """Write `model.safetensors`; False when that failed."""
        assert self._poller is not None
        command = commands.export(self._poller.address, self._folder / rundir.MODEL)
        child = self._spawn("export", "export", command, self._poller.address)
        deadline = Deadline.after(self._clock, self._config.export_s)
        while child.exit_code is None and not deadline.expired(self._clock):
            self._tick(0.1)
        if child.exit_code != 0:
            how = "did not end in time" if child.exit_code is None else _how(child)
            self._dashboard.note(f"the model was not exported: export {how}; see {child.log}", style="red")
        return child.exit_code == 0

    def _drain(self, timeout_s: float) -> None:
        """Show log lines until all children have exited, at most `timeout_s`."""
        deadline = Deadline.after(self._clock, timeout_s)
        while any(child.exit_code is None for child in self._children) and not deadline.expired(self._clock):
            self._tick(0.1)

    def _clean_up(self) -> None:
        """Whatever happened: end every child, then the keeper."""
        for number in _SIGNALS:
            signal.signal(number, signal.SIG_IGN)  # what follows is bounded; `Wakeup` puts the handlers back
        term_s = 0.0 if self._signals > 1 else 2.0
        coordinator = [child for child in self._children if child.role == "coordinator"]
        others = [child for child in self._children if child.role != "coordinator"]
        stuck = end_all(others, self._wakeup, term_s=term_s) + end_all(coordinator, self._wakeup, term_s=term_s)
        for child in self._children:
            for text in child.tail.lines(last=True):
                self._dashboard.line(child.role, child.name, text)
            child.close()
        for child in stuck:
            self._dashboard.note(f"{child.name} can't be killed: process {child.pid} is left behind", style="red")
        if self._poller is not None:
            self._poller.close()
        self._keeper.close()

    # ---- small things

    def _on_signal(self, number: int) -> None:
        self._signals += 1

    def _status(self) -> StatusReply | None:
        return self._poller.latest if self._poller else None

    def _over(self) -> bool:
        status = self._status()
        return status is not None and status.state in _OVER

    def _workers(self) -> list[Child]:
        return [child for child in self._children if child.role == "worker"]

    def _workers_gone(self) -> bool:
        return all(child.exit_code is not None for child in self._workers())

    def _child(self, name: str) -> Child:
        return next(child for child in self._children if child.name == name)


def _how(child: Child) -> str:
    """How a child ended, as the end of a sentence."""
    code = child.exit_code or 0
    if code >= 0:
        return f"exited with code {code}"
    with contextlib.suppress(ValueError):
        return f"was killed by {signal.Signals(-code).name}"
    return f"was killed by signal {-code}"


def _say_goodbye(folder: Path, launcher: Launcher) -> None:
    """The last lines: how it ended and where everything is; after a failure the script's traceback, last."""
    summary = rundir.read_summary(folder)
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.write("".join(f"{line}\n" for line in _result(summary, launcher.outcome, launcher.reason)))
        sys.stdout.write(f"run folder: {_shown(folder)}\n")
        sys.stdout.flush()
        if launcher.failure is not None and launcher.outcome == "failed":
            failure = launcher.failure
            sys.stderr.write(failure.traceback or f"{failure.name}: {failure.error}\n")
            sys.stderr.flush()


def _result(summary: dict[str, object], outcome: str, reason: str) -> list[str]:
    """The summary in a few lines."""
    shown = reason if outcome != "finished" else ""
    lines = [f"{outcome}: {shown}" if shown else outcome]
    if summary.get("samples"):
        lines[0] += f" · {summary['samples']} samples in {summary.get('seconds', 0):.1f} s"
        staleness = summary.get("staleness")
        if isinstance(staleness, dict):
            lines[0] += f", staleness mean {staleness.get('mean', 0):.2f}, max {staleness.get('max', 0)}"
    final = summary.get("final")
    if isinstance(final, dict):
        lines += [f"{name}: {value:.6g}" for name, value in sorted(final.items())]
    return lines


def _shown(folder: Path) -> str:
    """Relative to the current folder where it lies below it."""
    with contextlib.suppress(ValueError):
        return str(folder.relative_to(Path.cwd()))
    return str(folder)
