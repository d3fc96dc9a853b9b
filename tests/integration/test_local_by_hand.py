"""Coordinator, servers and workers started one by one on one host, and the commands that look at them."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest
from safetensors.torch import load_file

from tests.support import train
from tests.support.cluster import Process, run_psctl, wait_until
from tests.support.polling import assert_eventually

SCRIPT = Path(train.__file__)


def test_a_job_by_hand(tmp_path: Path) -> None:
    """Worker, server and coordinator of a job; `status` shows it, `export` copies it while it runs, SIGTERM drains.

    One cluster for all of these facts: starting one costs seconds.
    """
    files = [f"--address-file={tmp_path / 'address'}", f"--summary-file={tmp_path / 'summary.json'}"]
    coordinator = ["coordinator", f"--state={tmp_path / 'state'}", "--hold", *files]
    with Process(coordinator, tmp_path, "coordinator") as boss:
        assert_eventually((tmp_path / "address").exists)
        where = f"--coordinator={(tmp_path / 'address').read_text().strip()}"
        arguments = [str(SCRIPT), str(tmp_path), "--wait-worker=w"]
        with (
            Process(["worker", where, "--name=w", *arguments], tmp_path, "worker") as worker,
            Process(["server", where, "--name=s"], tmp_path, "server") as server,
        ):
            assert_eventually((tmp_path / "waiting").exists, timeout_s=60)
            check_status(tmp_path, where, boss, server, worker)
            check_export(tmp_path, where)
            check_memory_settings(server.process.pid)
            (tmp_path / "go").touch()
            assert worker.wait() == 0, worker.err
            wait_until(where.partition("=")[2], lambda s: s["job"] == "finished")
            assert server.process.poll() is None, "held until released"
            boss.signal(signal.SIGTERM)
            assert (boss.wait(), server.wait()) == (0, 0), boss.err + server.err
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["outcome"] == "finished" and summary["samples"] == 400


def check_status(folder: Path, where: str, boss: Process, server: Process, worker: Process) -> None:
    """`psctl status` in both forms."""
    wait_until(where.partition("=")[2], lambda s: s["shards"] and all(shard["version"] >= 1 for shard in s["shards"]))
    shown = run_psctl(["status", where, "--json"], folder)
    record = json.loads(shown.out)
    assert record["job"] == "running"
    members = {member["name"]: member for member in record["members"]}
    for name, role, process in (("s", "server", server), ("w", "worker", worker), ("coordinator", "coordinator", boss)):
        member = members[name]
        assert (member["role"], member["pid"], member["state"]) == (role, process.process.pid, "live")
        assert member["host"] == os.uname().nodename and member["heartbeat_age_s"] < 30
    assert members["s"]["address"].startswith("uv://127.0.0.1:")
    assert members["s"]["incarnation"] != members["w"]["incarnation"]
    assert {"samples", "samples_per_s", "epoch", "staleness"} <= set(record["progress"])
    assert all(shard["holder"] == "s" and shard["bytes"] > 0 for shard in record["shards"])
    table = run_psctl(["status", where], folder)
    assert table.process.returncode == 0 and "job running" in table.out


def check_export(folder: Path, where: str) -> None:
    """`psctl export` of a running job, by an observer that is not counted as a worker."""
    done = run_psctl(["export", where, f"--output={folder / 'out' / 'model.safetensors'}"], folder)
    assert done.process.returncode == 0, done.err
    tensors = load_file(folder / "out" / "model.safetensors")
    assert {name: tuple(tensor.shape) for name, tensor in tensors.items()} == {"weight": (3, 4), "bias": (3,)}
    assert [path.name for path in (folder / "out").iterdir()] == ["model.safetensors"]
    record = json.loads(run_psctl(["status", where, "--json"], folder).out)
    assert record["progress"]["workers_live"] == 1


def check_memory_settings(pid: int) -> None:
    """A server started by hand runs with the memory settings, under the process id it was started with."""
    environment = Path(f"/proc/{pid}/environ").read_bytes()
    assert b"THP_MEM_ALLOC_ENABLE=1" in environment and b"glibc.malloc.mmap_max=0" in environment


@pytest.mark.parametrize("command", ["server", "worker", "status", "export"])
def test_nobody_listens(tmp_path: Path, command: str) -> None:
    """Each command that needs a coordinator says so, with its address, and exits with 3."""
    more = {"worker": [str(SCRIPT), str(tmp_path)], "export": [f"--output={tmp_path / 'm'}"]}.get(command, [])
    bound = "--timeout-s=1" if command == "status" else "--join-timeout-s=1"
    done = run_psctl([command, "--coordinator=127.0.0.1:1", bound, *more], tmp_path)
    assert done.process.returncode == 3, done.err
    assert "127.0.0.1:1" in done.err and "Traceback" not in done.err


def test_wrong_settings(tmp_path: Path) -> None:
    """Wrong addresses, names and numbers are refused with exit code 2 and one line."""
    for arguments, message in (
        (["server"], "give --coordinator"),
        (["server", "--coordinator=nowhere"], "HOST:PORT"),
        (["server", "--coordinator=127.0.0.1:1", "--join-timeout-s=0"], "greater than 0"),
        (["server", "--coordinator=127.0.0.1:1", "--interface=nosuch0"], "nosuch0"),
        (["worker", "--coordinator=127.0.0.1:1", "nothing.py"], "no script"),
        (["coordinator", "--state=x", "--port=70000"], "65535"),
        (["plan", "--model=nosuchmodule:f", "--servers=1"], "nosuchmodule"),
    ):
        done = run_psctl(arguments, tmp_path)
        assert done.process.returncode == 2, (arguments, done.err)
        assert message in done.err and len(done.err.splitlines()) == 1, done.err
