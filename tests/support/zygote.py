"""Real coordinators, servers and workers in milliseconds: processes forked off one that has imported everything.

`python -m tests.support.zygote` reads one JSON job a line and forks a child for it: `{"role": "server", ...}`. At the
end of its input it kills what still runs. Nothing is started before the fork: no thread, no RPC, no gRPC.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from tests.support.polling import assert_eventually

ROOT = Path(__file__).parents[2]
END_S = 60.0


class Zygote:
    """The parent of forked members; use it as a context manager. Nothing of it runs after the block."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._jobs = 0
        env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}
        command = [sys.executable, "-m", __name__]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, env=env, text=True)

    def start(self, role: str, **settings: object) -> Path:
        """Fork a member; returns the file that will hold its exit code. Its output goes beside it, into `.log`."""
        self._jobs += 1
        code = self._folder / f"{role}-{self._jobs}.code"
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"role": role, "code": str(code), **settings}) + "\n")
        self._process.stdin.flush()
        return code

    def wait(self, code: Path) -> int:
        """The exit code of a member, once it has ended; the log of one that fails is in the failure's text."""
        assert_eventually(code.exists, END_S, f"the end of {code.stem}: {self.log(code)}")
        return int(code.read_text())

    def log(self, code: Path) -> str:
        """A member's output so far."""
        path = code.with_suffix(".log")
        return path.read_text() if path.exists() else ""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait(END_S)


def train(
    folder: Path,
    case: str,
    *,
    servers: int,
    exact: bool,
    shard_bytes: int,
    zygote: Zygote,
    queue_bytes: int = 1 << 30,
    message_bytes: int = 8 << 20,
) -> Path:
    """One job: coordinator, servers, and a worker that trains a case; returns the file with the servers' weights."""
    folder.mkdir()
    address, weights = folder / "coordinator", folder / "weights.pt"
    started = [zygote.start("coordinator", folder=str(folder), servers=servers, exact=exact, shard_bytes=shard_bytes)]
    assert_eventually(address.exists, END_S, "the coordinator's address")
    where = address.read_text().strip()
    started += [zygote.start("server", coordinator=where, queue_bytes=queue_bytes) for _ in range(servers)]
    started += [zygote.start("worker", coordinator=where, case=case, weights=str(weights), message_bytes=message_bytes)]
    for code in reversed(started):
        assert zygote.wait(code) == 0, zygote.log(code)
    return weights


def _coordinator(job: dict[str, Any]) -> int:
    from ps.config import CoordinatorConfig
    from ps.control.server import run_coordinator

    folder = Path(job["folder"])
    config = CoordinatorConfig(
        state=folder / "state.db",
        address_file=folder / "coordinator",
        summary_file=folder / "summary.json",
        servers=job["servers"],
        exact=job["exact"],
        shard_bytes=job["shard_bytes"],
    )
    return run_coordinator(config)


def _server(job: dict[str, Any]) -> int:
    from ps.config import MemberConfig, ServerConfig
    from ps.server.process import run_server
    from ps.types import Address

    member = MemberConfig(coordinator=Address.parse(job["coordinator"]))
    return run_server(ServerConfig(member=member, queue_bytes=job["queue_bytes"]))


def _worker(job: dict[str, Any]) -> int:
    import torch

    from ps.types import Address
    from tests.numerics.cases import run
    from tests.support.oracle import weights
    from workers import Worker
    from workers.cluster import Cluster
    from workers.config import WorkerConfig

    config = WorkerConfig(coordinator=Address.parse(job["coordinator"]), message_bytes=job["message_bytes"])
    with Worker(Cluster(config), config) as worker:
        model = run(job["case"], worker.attach)
        with torch.no_grad():
            for param in model.parameters():
                param.zero_()  # whatever is there afterwards came from the servers
        worker.pull()
        torch.save(weights(model), job["weights"])
    return 0


def _rank(job: dict[str, Any]) -> int:
    from tests.support.ranks import run_rank

    return run_rank(job)


_ROLES = {"coordinator": _coordinator, "server": _server, "worker": _worker, "rank": _rank}


def _child(job: dict[str, Any]) -> None:
    """Run a member and end the process as a launched one would."""
    import faulthandler

    faulthandler.register(signal.SIGUSR1)
    code = Path(job["code"])
    log = os.open(code.with_suffix(".log"), os.O_CREAT | os.O_WRONLY)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(log, 1)
    os.dup2(log, 2)
    result = 1
    try:
        result = _ROLES[job["role"]](job)
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        part = code.with_suffix(".part")
        part.write_text(str(result))
        part.rename(code)
        os._exit(result)


def main() -> None:
    """Fork a child per line of input; at its end kill what still runs."""
    import ps.control.server
    import ps.optim.apply
    import ps.server.process
    import tests.numerics.cases
    import workers.cluster
    import workers.worker

    ps.optim.apply.warm_up()
    del ps, tests, workers
    children = []
    for line in sys.stdin:
        pid = os.fork()
        if pid == 0:
            _child(json.loads(line))
        children.append(pid)
    for pid in children:
        if os.waitpid(pid, os.WNOHANG) == (0, 0):
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


if __name__ == "__main__":
    main()
