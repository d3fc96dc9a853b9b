"""bsp, backup workers and ssp through `psctl local`: real processes, servers that agree, a worker killed in a round."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from tests.integration.test_local_kill import state, steps
from tests.support import train
from tests.support.cluster import Local
from tests.support.polling import assert_eventually

SCRIPT = Path(train.__file__)
SAMPLES = 472
"""59 batches of 8: three workers have ragged ends."""


def job(folder: Path, consistency: str, *arguments: str) -> Local:
    """Two servers and three workers."""
    return Local(
        SCRIPT,
        folder,
        servers=2,
        workers=3,
        flags=[f"--consistency={consistency}", "--shard-bytes=64"],
        arguments=[str(folder), f"--samples={SAMPLES}", *arguments],
    )


@pytest.mark.parametrize("consistency", ["bsp:backup=1", "ssp:2"])
def test_ragged_data_over_real_processes(consistency: str, tmp_path: Path) -> None:
    """All samples are done once, and the job ends: whoever waits for data holds up nobody."""
    with job(tmp_path, consistency) as local:
        assert local.wait() == 0, local.out + local.err
    summary = local.summary()
    assert (summary["outcome"], summary["samples"]) == ("finished", SAMPLES)
    assert set(train.seen(tmp_path)[0].values()) == {1}
    assert (summary["dropped_pushes"] > 0) == (consistency == "bsp:backup=1")


def test_a_worker_killed_in_a_round_holds_up_the_others_until_it_is_evicted(tmp_path: Path) -> None:
    """The others stand still while one doesn't push; as soon as its death is known they go on, without it."""
    with job(tmp_path, "bsp", "--wait-worker=worker-1", "--wait-step=3") as local:
        assert_eventually((tmp_path / "waiting").exists, what="worker-1 holds a batch and has pushed three times")
        others = ("worker-0", "worker-2")
        stuck = local.wait_until(lambda s: all(steps(s, name) >= 3 for name in others), "the others wait")
        assert stuck["settings"]["consistency"] == "bsp"
        assert stuck["progress"]["clock_spread"] <= 1
        os.kill(local.pid("worker-1"), signal.SIGKILL)
        after = local.wait_until(lambda s: state(s, "worker-1") == "dead", "the dead worker is evicted")
        assert max(steps(stuck, name) for name in others) == 3
        local.wait_until(lambda s: s["job"] == "finished" or all(steps(s, name) >= 6 for name in others), "they go on")
        assert after["job"] == "running"
        assert local.wait() == 0, local.out + local.err
    assert local.summary()["samples"] == SAMPLES
    assert set(train.seen(tmp_path)[0]) == set(range(SAMPLES))
    assert local.summary()["shrunk_rounds"] >= 1
