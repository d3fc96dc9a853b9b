"""The run folder: unique, never overwritten, and readable however the job ended."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from ps.errors import ConfigError
from workers import rundir


def failure(name: str, code: int) -> rundir.Failure:
    """A failure as a worker would write it."""
    return rundir.Failure(name=name, exit_code=code, error="ValueError: x", traceback="Traceback ...\n")


def test_two_at_the_same_moment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs that start within one second get folders of their own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("time.strftime", lambda _: "20300101-000000")
    first, second = rundir.create(None), rundir.create(None)
    assert [first.name, second.name] == ["20300101-000000", "20300101-000000-2"]


def test_a_run_is_never_overwritten(tmp_path: Path) -> None:
    """An empty folder is taken; one that holds a run is refused."""
    assert rundir.create(tmp_path / "new") == tmp_path / "new"
    (tmp_path / "new" / rundir.STATE).touch()
    with pytest.raises(ConfigError, match="already holds a run"):
        rundir.create(tmp_path / "new")


def test_a_folder_that_can_not_be_made(tmp_path: Path) -> None:
    """Said as a wrong setting, not as a traceback."""
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="can't be made"):
        rundir.create(tmp_path / "file" / "run")


def test_the_first_failure_counts(tmp_path: Path) -> None:
    """Of two scripts that failed, the one that wrote it down first is shown."""
    folder = rundir.create(tmp_path)
    for name, code, at in (("worker-0", 1, 200), ("worker-1", 7, 100)):
        path = rundir.error_file(folder, name)
        rundir.write_failure(path, failure(name, code))
        os.utime(path, (at, at))
    assert rundir.first_failure(folder, ["worker-0", "worker-1"]) == failure("worker-1", 7)
    assert rundir.first_failure(folder, ["worker-2"]) is None


def test_summary_is_always_there(tmp_path: Path) -> None:
    """Without the coordinator's summary there is one with all keys; the coordinator's is left alone."""
    rundir.ensure_summary(tmp_path, "interrupted", "two signals")
    record = json.loads((tmp_path / rundir.SUMMARY).read_text())
    assert record["outcome"] == "interrupted" and record["samples"] == 0
    assert {"seconds", "samples_per_s", "pushes", "pulls", "bytes_pushed", "bytes_pulled", "workers_seen"} <= set(
        record
    )
    assert record["staleness"] == {"mean": 0.0, "max": 0, "histogram": {}} and record["final"] == {}
    rundir.ensure_summary(tmp_path, "finished", "")
    assert json.loads((tmp_path / rundir.SUMMARY).read_text()) == record
