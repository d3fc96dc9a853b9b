"""Clusters of real processes: `psctl local`, and coordinator, servers and workers started one by one."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

from tests.support.leaks import processes_with
from tests.support.polling import assert_eventually

ROOT = Path(__file__).parents[2]
DIGITS = ROOT / "examples" / "digits.py"
PSCTL = (sys.executable, "-P", "-m", "workers")
END_S = 100.0
"""Bound on the end of a process; far more than any of them needs."""

Json = dict[str, Any]
"""A parsed JSON object; tests look at it key by key."""


class Process:
    """One `psctl` process with its output in files; killed with its process group on leaving the block."""

    def __init__(
        self, arguments: Sequence[str], folder: Path, name: str, *,
        env: Mapping[str, str] | None = None, prefix: Sequence[str] = (),
    ) -> None:  # fmt: skip
        folder.mkdir(parents=True, exist_ok=True)
        self.out_file, self.err_file = folder / f"{name}.out", folder / f"{name}.err"
        self.folder = folder
        with self.out_file.open("wb") as out, self.err_file.open("wb") as err:
            self.process = self._start([*prefix, *PSCTL, *arguments], folder, out, err, env or {})

    def _start(
        self, command: list[str], folder: Path, out: IO[bytes], err: IO[bytes], env: Mapping[str, str]
    ) -> subprocess.Popen[bytes]:
        full = {**clean_environment(), "PS_TEST_FOLDER": str(folder), **env}
        return subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=out, stderr=err, env=full, cwd=folder, start_new_session=True
        )

    @property
    def out(self) -> str:
        """Its stdout so far."""
        return self.out_file.read_text(errors="replace")

    @property
    def err(self) -> str:
        """Its stderr so far."""
        return self.err_file.read_text(errors="replace")

    def wait(self, timeout_s: float = END_S) -> int:
        """Its exit code; fails the test, with its output, when it does not end in time."""
        try:
            return self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(
                f"still running after {timeout_s:g} s\n{self.out[-3000:]}\n{self.err[-3000:]}"
            ) from None

    def signal(self, number: int) -> None:
        """Send it a signal."""
        self.process.send_signal(number)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait(10)


class Local(Process):
    """`psctl local` with a run folder; after the block nothing of it may run any more."""

    def __init__(
        self, script: Path | str, folder: Path, *, servers: int = 1, workers: int = 1, flags: Sequence[str] = (),
        arguments: Sequence[str] = (), env: Mapping[str, str] | None = None,
    ) -> None:  # fmt: skip
        self.run_dir = folder / "run"
        if not isinstance(script, Path):
            folder.mkdir(parents=True, exist_ok=True)
            path = folder / "script.py"
            path.write_text(script)
            script = path
        command = ["local", f"--servers={servers}", f"--workers={workers}", f"--run-dir={self.run_dir}", *flags]
        super().__init__([*command, str(script), *arguments], folder, "local", env=env)

    def address(self) -> str:
        """The coordinator's address, as soon as it listens."""
        path = self.run_dir / "coordinator"
        assert_eventually(path.exists, what="the coordinator's address")
        return path.read_text().strip()

    def summary(self) -> Json:
        """`summary.json`."""
        record = json.loads((self.run_dir / "summary.json").read_text())
        assert isinstance(record, dict)
        return record

    def log(self, name: str) -> str:
        """The log of one process so far."""
        path = self.run_dir / "logs" / f"{name}.log"
        return path.read_text(errors="replace") if path.exists() else ""

    def status(self) -> Json | None:
        """`psctl status --json`, None while nobody answers."""
        return status(self.address())

    def wait_until(self, condition: Callable[[Json], object], what: str = "") -> Json:
        """Wait until the job's status fulfils the condition; returns that status."""
        return wait_until(self.address(), condition, what)

    def pid(self, name: str) -> int:
        """Process id of a live member."""
        record = self.wait_until(lambda s: any(m["name"] == name and m["state"] == "live" for m in s["members"]), name)
        return next(int(m["pid"]) for m in record["members"] if m["name"] == name and m["state"] == "live")

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        super().__exit__(kind, error, tb)
        assert_eventually(lambda: not processes_with(str(self.folder)), what="processes gone")


def status(address: str) -> Json | None:
    """What `psctl status --json` prints, None while nobody answers."""
    from ps import views
    from ps.control import client
    from ps.errors import CoordinatorLost
    from ps.types import Address

    try:
        record: Json = json.loads(json.dumps(views.status_record(client.status(Address.parse(address), 2.0))))
    except CoordinatorLost:
        return None
    return record


def wait_until(address: str, condition: Callable[[Json], object], what: str = "") -> Json:
    """Wait until the status of the job at `address` fulfils the condition; returns that status."""
    found: list[Json] = []

    def holds() -> bool:
        record = status(address)
        if record is not None and condition(record):
            found.append(record)
        return bool(found)

    assert_eventually(holds, timeout_s=60, what=what)
    return found[0]


def clean_environment() -> dict[str, str]:
    """The environment without what would change a cluster: settings of this project, and proxies."""
    dropped = ("PS_", "TP_", "GRPC_")
    return {
        key: value
        for key, value in os.environ.items()
        if not key.startswith(dropped) and not key.lower().endswith("_proxy")
    }


def run_psctl(arguments: Sequence[str], folder: Path, env: Mapping[str, str] | None = None) -> Process:
    """Run a `psctl` command to its end."""
    with Process(arguments, folder, arguments[0], env=env) as process:
        process.wait()
    return process
