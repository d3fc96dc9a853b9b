"""Process groups as workers, in a real job: torchrun, lost and failing ranks, signals."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.cluster import ROOT, Json, clean_environment, status, wait_until
from tests.support.polling import assert_eventually
from tests.support.ranks import SAMPLES, record, start_group
from tests.support.train import seen
from tests.support.zygote import END_S, Zygote

SCRIPT = """
import sys, torch, workers
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel

distributed.init_process_group("gloo")
with workers.join() as worker:
    model = DistributedDataParallel(nn.Linear(4, 3))
    optimizer = worker.attach(model, torch.optim.SGD(model.parameters(), lr=0.01))
    for epoch in worker.epochs(torch.randn(50, 4), batch_size=4, count=2):
        for x in epoch:
            model(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    worker.pull()
    if distributed.get_rank() == 0:
        worker.report(groups=1)
        print("moments", len(optimizer.state_dict()["state"]))
    else:
        try:
            optimizer.state_dict()
        except Exception as error:
            print(type(error).__name__, error)
    print("steps", worker.global_step, flush=True)
distributed.destroy_process_group()
"""


@pytest.fixture(scope="module")
def zygote(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Zygote]:
    with Zygote(tmp_path_factory.mktemp("members")) as zygote:
        yield zygote


class Job:
    """A coordinator and a server, forked; groups are added by the test."""

    def __init__(self, zygote: Zygote, folder: Path) -> None:
        self.zygote = zygote
        self.folder = folder
        self.codes = [zygote.start("coordinator", folder=str(folder), servers=1, exact=False, shard_bytes=0)]
        assert_eventually((folder / "coordinator").exists, END_S, "the coordinator's address")
        self.address = (folder / "coordinator").read_text().strip()
        self.codes.append(zygote.start("server", coordinator=self.address, queue_bytes=1 << 30))

    def group(self, name: str, script: str = "train", **options: Any) -> list[Path]:
        """Two ranks of a group; their exit-code files."""
        return start_group(self.zygote, self.folder, self.address, name, script, epochs=1, **options)

    def member(self, name: str) -> Json:
        """A member as the status shows it."""
        found = status(self.address)
        assert found is not None
        return next(member for member in found["members"] if member["name"] == name)

    def end(self, code: int = 0) -> None:
        """The coordinator's exit code, and the server's."""
        assert self.zygote.wait(self.codes[0]) == code, self.zygote.log(self.codes[0])
        self.zygote.wait(self.codes[1])


@pytest.fixture
def job(zygote: Zygote, tmp_path: Path) -> Job:
    return Job(zygote, tmp_path)


def log(job: Job, code: Path) -> str:
    return job.zygote.log(code)


def test_torchrun(job: Job, tmp_path: Path) -> None:
    """`torchrun --nproc-per-node 2 script.py` with $PS_COORDINATOR is one worker; state is read on rank 0 only."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    command = [sys.executable, "-W", "error", "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    env = {**clean_environment(), "PS_COORDINATOR": job.address, "PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "error"}
    done = subprocess.run([*command, str(script)], env=env, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search("warning", done.stderr, re.IGNORECASE) is None, done.stderr
    assert done.stdout.count("steps 12\n") == 2  # two epochs of 50 samples in batches of 2 × 4, the last one of 10
    assert "UnsupportedError optimizer.state_dict() on rank 1 of a process group" in done.stdout
    assert "moments 0" in done.stdout  # SGD without momentum has none
    job.end()


def test_a_killed_rank_ends_its_group_and_no_other(job: Job) -> None:
    """SIGKILL to a follower: rank 0 hands the group's data back and exits non-zero; another group does all the rest."""
    first, second = job.group("lost", at={"1": {"step": 3, "do": signal.SIGKILL}})
    assert job.zygote.wait(first) == 1
    assert "lost rank 1 of its process group" in job.member("lost")["reason"]
    del second  # killed: it has left no exit code
    for code in job.group("other"):
        assert job.zygote.wait(code) == 0, log(job, code)
    job.end()
    counts = seen(job.folder)[0]
    assert set(counts) == set(range(SAMPLES))
    assert sum(counts.values()) <= SAMPLES + 16  # the step under way may have been applied


def test_a_killed_rank_0_ends_its_group(job: Job) -> None:
    """The coordinator evicts it; the follower says that rank 0 is gone, or what gloo says, and exits non-zero."""
    _, follower = job.group("lost", at={"0": {"step": 3, "do": signal.SIGKILL}})
    assert job.zygote.wait(follower) == 1
    wait_until(job.address, lambda s: any(m["name"] == "lost" and m["state"] == "dead" for m in s["members"]))
    for code in job.group("other"):
        assert job.zygote.wait(code) == 0, log(job, code)
    job.end()
    assert set(seen(job.folder)[0]) == set(range(SAMPLES))


@pytest.mark.parametrize("rank", [0, 1])
def test_a_script_that_raises_on_one_rank_fails_the_job(job: Job, rank: int) -> None:
    """As it does in a worker of one process; the job's reason is the script's own error, whichever rank it was on."""
    for code in job.group("bad", at={str(rank): {"step": 2, "do": "raise"}}):
        assert job.zygote.wait(code) == 1
    job.end(1)
    assert "ValueError: raised by the script" in json.loads((job.folder / "summary.json").read_text())["reason"]


@pytest.mark.parametrize("rank", [0, 1])
def test_sigterm_to_any_rank_drains_the_group(job: Job, rank: int) -> None:
    """All ranks stop at the same batch with exit code 0, having pushed it; the rest is for others, each sample once."""
    for code in job.group("gone", at={str(rank): {"step": 2, "do": signal.SIGTERM}}):
        assert job.zygote.wait(code) == 0, log(job, code)
    assert job.member("gone")["state"] == "left"
    for code in job.group("other"):
        assert job.zygote.wait(code) == 0, log(job, code)
    job.end()
    assert seen(job.folder)[0] == Counter(range(SAMPLES))


def test_every_refusal_is_raised_on_all_ranks(job: Job) -> None:
    """The same type on each, before anything is sent; the group goes on afterwards."""
    codes = job.group("group", script="refusals")
    for code in codes:
        assert job.zygote.wait(code) == 0, log(job, code)
    job.end()
    first, second = record(job.folder, "group", 0), record(job.folder, "group", 1)
    assert second.pop("state on rank 1")[0] == "UnsupportedError"
    assert first.pop("steps") == second.pop("steps") == 1
    assert {name: (kind, text) for name, (kind, text, _) in first.items()} == {
        name: (kind, text) for name, (kind, text, _) in second.items()
    }
    texts = {name: f"{kind}: {text}" for name, (kind, text, _) in first.items()}
    for name, expected in REFUSALS.items():
        assert re.search(expected, texts.pop(name)), name
    assert not texts
    assert "raised on rank 1 of the process group" in first["not its parameters"][2]
    assert any("make it before worker.attach()" in note for note in second["wrapped after attach"][2])


REFUSALS = {
    "other models": r"PsError: rank 1 is in attach\(\) \(AdamW of 6 parameters, \w+\), and rank 0 in attach\(\)",
    "not its parameters": r"ModelError: parameter .* is not in the model given to attach\(\)",
    "unreduced": r"UnsupportedError: .*the gradients of rank 1 are not those of rank 0",
    "edited on rank 1": r"LocalWeightEdit: weights of 'body.0.weight' were changed locally on rank 1",
    "not finite": r"NonFiniteGradient: the gradient of 'body.0.weight' holds inf or NaN at step 0",
    "pull on rank 0 only": r"PsError: rank 1 is in step\(\), and rank 0 in pull\(\)",
    "wrapped after attach": r"LocalWeightEdit: weights of 'body.0.weight' were changed locally",
}
