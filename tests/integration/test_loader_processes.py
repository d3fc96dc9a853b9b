"""`epochs(num_workers=...)`: order, errors, dead processes, and none left behind. With fork, which needs no imports."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.utils.data import Dataset, get_worker_info

from ps.alone import LocalJob
from ps.errors import PsError
from tests.support.cluster import clean_environment
from tests.support.leaks import child_pids
from workers import Worker, permutation
from workers.config import WorkerConfig


class Numbers(Dataset[int]):
    """Samples are their own numbers; must be loaded by loader processes."""

    def __len__(self) -> int:
        return 50

    def __getitem__(self, index: int) -> int:
        assert get_worker_info() is not None
        return index


class Broken(Numbers):
    """Sample 7 can't be loaded."""

    def __getitem__(self, index: int) -> int:
        if index == 7:
            raise LookupError("sample 7 is broken")
        return index


class Deadly(Numbers):
    """Sample 7 kills its loader process."""

    def __getitem__(self, index: int) -> int:
        if index == 7:
            os.kill(os.getpid(), signal.SIGKILL)
        return index


def tensor(samples: list[int]) -> Tensor:
    return torch.tensor(samples)


@pytest.fixture
def job() -> LocalJob:
    return LocalJob()


@pytest.fixture
def worker(job: LocalJob) -> Iterator[Worker]:
    with Worker(job.member(), WorkerConfig()) as worker:
        yield worker
    assert child_pids() == []


@pytest.mark.parametrize("persistent", [True, False])
def test_order_is_kept_over_epochs_and_a_break(worker: Worker, persistent: bool) -> None:
    """Each epoch is the permutation, after a break too; the script's own random numbers stay what they are."""
    state = torch.get_rng_state()
    stream = worker.epochs(
        Numbers(), 4, 3, 5, num_workers=2, multiprocessing_context="fork", collate_fn=tensor,
        persistent_workers=persistent,
    )  # fmt: skip
    seen: list[int] = []
    processes: set[int] = set()
    for epoch in stream:
        for number, batch in enumerate(epoch):
            seen += batch.tolist()
            processes |= set(child_pids())
            if epoch.index == 1 and number == 2:
                break
        assert len(child_pids()) == 2 * persistent
    assert len(processes) == (2 if persistent else 6)
    orders = [permutation(5, epoch, 50).tolist() for epoch in range(3)]
    # nothing was pushed or consumed to the end in epoch 1 but its first two batches
    assert seen == [*orders[0], *orders[1][:12], *orders[1][8:], *orders[2]]
    assert torch.equal(torch.get_rng_state(), state)
    assert child_pids() == []


def test_an_error_comes_with_the_traceback_of_the_loader_process(job: LocalJob, worker: Worker) -> None:
    """Its type and its lines reach the script; the batches before it are done, the others go back."""
    seen: list[int] = []
    with pytest.raises(LookupError, match=r"(?s)process.*__getitem__.*sample 7 is broken"):
        for epoch in worker.epochs(
            Broken(), 5, shuffle=False, num_workers=2, multiprocessing_context="fork", collate_fn=tensor
        ):
            for batch in epoch:
                seen += batch.tolist()
    assert seen == [0, 1, 2, 3, 4]
    assert job.state.data.samples == 5 and not job.state.data.holders()


def test_a_dead_loader_process_is_an_error_that_says_so(worker: Worker) -> None:
    """Not a hang: how it died, and what to look at."""
    with pytest.raises(PsError, match=r"loader process \d+ was killed by SIGKILL.*/dev/shm"):
        for epoch in worker.epochs(
            Deadly(), 5, shuffle=False, num_workers=2, multiprocessing_context="fork", collate_fn=tensor
        ):
            for _ in epoch:
                pass


CAPTURING = """
import torch, workers
from torch.utils.data import Dataset
from ps.errors import ConfigError

class Capturing(Dataset):
    def __init__(self, held): self.held = held
    def __len__(self): return 3
    def __getitem__(self, index): return index

if __name__ == "__main__":
    with workers.join() as worker:
        for method in ("spawn", "forkserver"):
            for held in (worker, lambda: 1):
                try:
                    worker.epochs(Capturing(held), 2, num_workers=1, multiprocessing_context=method)
                except ConfigError as error:
                    print(error)
        for epoch in worker.epochs(torch.arange(3), 3):  # the refused ones were no streams
            print(*epoch)
"""


def test_a_dataset_that_holds_the_worker_is_refused_in_a_sentence(tmp_path: Path) -> None:
    """Before any process is started, and before the coordinator hears of the stream; nothing else is printed."""
    done = script(tmp_path, CAPTURING)
    lines = done.stdout.splitlines()
    assert done.returncode == 0 and done.stderr == "", done.stderr
    refused = "epochs(num_workers=1): the dataset, collate_fn or worker_init_fn can't be sent to loader processes: "
    assert [line.startswith(refused) for line in lines] == [True] * 4 + [False]
    assert ["a Worker can't be pickled" in line for line in lines] == [True, False, True, False, False]
    assert all('multiprocessing_context="fork"' in line for line in lines[:4])


UNGUARDED = """
import torch, workers
from torch.utils.data import Dataset

class Numbers(Dataset):
    def __len__(self): return 3
    def __getitem__(self, index): return index

with workers.join() as worker:
    for epoch in worker.epochs(Numbers(), 2, num_workers=1, multiprocessing_context="spawn"):
        print(*epoch)
"""


def test_a_script_without_main_guard_does_not_join_again(tmp_path: Path) -> None:
    """A loader process imports the script; what it finds there must not become another worker of the job."""
    done = script(tmp_path, UNGUARDED)
    assert done.returncode == 1 and done.stdout == ""
    assert "ConfigError: join() was called while a new process imports the script" in done.stderr
    assert done.stderr.count("__main__") > 1 and "exited with code 1" in done.stderr.splitlines()[-1]


def script(folder: Path, text: str) -> subprocess.CompletedProcess[str]:
    """Run a script on its own; whatever it leaves running keeps its output open, and fails the test."""
    path = folder / "script.py"
    path.write_text(text)
    return subprocess.run(
        [sys.executable, "-W", "error", str(path)], env=clean_environment(), capture_output=True, text=True, timeout=60
    )


def test_collate_functions_also_in_this_process(worker: Worker) -> None:
    """Of a dataset, of a tensor, and of several: samples come one by one."""
    (epoch,) = worker.epochs([(1, "a"), (2, "bb")], 2, shuffle=False, collate_fn=list[tuple[int, str]])
    assert list(epoch) == [[(1, "a"), (2, "bb")]]
    (rows,) = worker.epochs(torch.arange(3), 3, shuffle=False, collate_fn=lambda rows: [int(row) for row in rows])
    assert list(rows) == [[0, 1, 2]]
