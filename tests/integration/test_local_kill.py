"""Workers that are killed, join late, or are asked to leave; servers and coordinators that die."""

from __future__ import annotations

import os
import signal
from collections import Counter
from pathlib import Path

from tests.support import train
from tests.support.cluster import Json, Local, Process
from tests.support.polling import assert_eventually

SCRIPT = Path(train.__file__)
SAMPLES = 800


def job(folder: Path, *arguments: str, workers: int = 2, servers: int = 1) -> Local:
    """A cluster that trains on 800 samples, in 100 batches."""
    return Local(
        SCRIPT, folder, servers=servers, workers=workers, arguments=[str(folder), f"--samples={SAMPLES}", *arguments]
    )


def steps(status: Json, name: str) -> int:
    """Steps of a worker."""
    return max((int(m["steps"]) for m in status["members"] if m["name"] == name), default=0)


def state(status: Json, name: str) -> str:
    """State of a member, the newest of that name."""
    return [str(m["state"]) for m in status["members"] if m["name"] == name][-1]


def all_once_or_more(folder: Path) -> Counter[int]:
    """How often each sample of epoch 0 was pushed; each at least once."""
    counts = train.seen(folder)[0]
    assert set(counts) == set(range(SAMPLES))
    return counts


def test_worker_killed_in_mid_epoch(tmp_path: Path) -> None:
    """SIGKILL to a worker that holds a batch: it is evicted at once, its batch goes to another, and the job finishes.

    The other worker goes on meanwhile, long before the dead one's lease could have expired.
    """
    with job(tmp_path, "--wait-worker=worker-1", "--wait-step=1", "--step-s=0.02") as local:
        assert_eventually((tmp_path / "waiting").exists, what="worker-1 holds a batch")
        before = local.wait_until(lambda s: steps(s, "worker-0") >= 2)
        os.kill(local.pid("worker-1"), signal.SIGKILL)
        after = local.wait_until(lambda s: state(s, "worker-1") == "dead", "the dead worker is evicted")
        assert after["job"] == "running"
        reason = next(m["reason"] for m in after["members"] if m["name"] == "worker-1")
        assert "killed by signal 9" in reason, "not by an expired lease"
        local.wait_until(lambda s: s["job"] == "finished" or steps(s, "worker-0") > steps(before, "worker-0"))
        assert local.wait() == 0, local.out + local.err
    counts = all_once_or_more(tmp_path)
    assert sum(counts.values()) - SAMPLES <= 16, "only what was pushed and not acknowledged may come twice"
    assert local.summary()["samples"] == SAMPLES and local.summary()["outcome"] == "finished"
    assert "worker-1 was killed by SIGKILL" in local.out


def test_every_worker_killed(tmp_path: Path) -> None:
    """When the last worker is killed the job has failed; it does not wait for one that will never come."""
    with job(tmp_path, "--wait-worker=worker-0", workers=1) as local:
        assert_eventually((tmp_path / "waiting").exists)
        os.kill(local.pid("worker-0"), signal.SIGKILL)
        assert local.wait() == 1
    assert local.summary()["outcome"] == "failed"
    assert "SIGKILL" in local.summary()["reason"] or "worker" in local.summary()["reason"]


def test_worker_joins_late_and_worker_drains(tmp_path: Path) -> None:
    """Workers started by hand take leases while the job runs; at SIGTERM one finishes its step and exits with 0, and so
    it does at Ctrl-C, with 130. Nobody dies, so each sample is pushed exactly once.
    """
    with job(tmp_path, "--wait-worker=worker-0", "--step-s=0.01", workers=1) as local:
        assert_eventually((tmp_path / "waiting").exists)
        late = [
            "worker",
            f"--coordinator={local.address()}",
            str(SCRIPT),
            str(tmp_path),
            f"--samples={SAMPLES}",
            "--step-s=0.1",
        ]
        with Process([*late[:2], "--name=a", *late[2:]], tmp_path, "a") as a:
            with Process([*late[:2], "--name=b", *late[2:]], tmp_path, "b") as b:
                local.wait_until(lambda s: steps(s, "a") >= 2 and steps(s, "b") >= 2, "the late workers train")
                a.signal(signal.SIGTERM)
                b.signal(signal.SIGINT)
                assert (a.wait(), b.wait()) == (0, 130), a.err + b.err
        drained = local.wait_until(lambda s: state(s, "a") == state(s, "b") == "left")
        assert steps(drained, "a") + steps(drained, "b") < 100
        (tmp_path / "go").touch()
        assert local.wait() == 0, local.out + local.err
    assert set(all_once_or_more(tmp_path).values()) == {1}
    assert local.summary()["workers_seen"] == 3


def test_server_killed(tmp_path: Path) -> None:
    """Without replicas a lost server ends the job at once, with a reason that names it."""
    with job(tmp_path, "--wait-worker=worker-0", workers=1, servers=2) as local:
        assert_eventually((tmp_path / "waiting").exists)
        os.kill(local.pid("server-1"), signal.SIGKILL)
        (tmp_path / "go").touch()
        assert local.wait() == 1
    assert local.summary()["outcome"] == "failed" and "server-1" in local.summary()["reason"]
    assert not (local.run_dir / "model.safetensors").exists()


def test_coordinator_killed(tmp_path: Path) -> None:
    """A launcher whose coordinator is gone ends the job, and leaves a summary in its place."""
    with job(tmp_path, "--wait-worker=worker-0", workers=1) as local:
        assert_eventually((tmp_path / "waiting").exists)
        os.kill(local.pid("coordinator"), signal.SIGKILL)
        assert local.wait() == 1
    assert local.summary()["outcome"] == "failed" and "coordinator was killed by SIGKILL" in local.summary()["reason"]
