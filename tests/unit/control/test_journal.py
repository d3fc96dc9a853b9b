"""The journal: what is appended comes back, one process at a time, and foreign files are refused."""

from __future__ import annotations

import sqlite3
import stat
from pathlib import Path

import pytest

from ps.control.api import DataRange, StreamSpec
from ps.control.journal import FORMAT, Journal
from ps.control.records import (
    DoneRecord,
    IdsRecord,
    JobRecord,
    MapRecord,
    MemberPruned,
    MemberRecord,
    NumberRecord,
    Record,
    Replay,
    StreamRecord,
)
from ps.errors import ConfigError
from ps.types import Incarnation, JobState, MemberState, Role
from tests.support.control import World


def member(number: int, *, state: MemberState = MemberState.LIVE) -> MemberRecord:
    return MemberRecord(
        incarnation=Incarnation(number), role=Role.WORKER, name=f"w{number}", host="h", pid=5, secret=b"\x00\xff" * 8,
        nonce=b"n" * 16, state=state, address="uv://h:1", reason="",
    )  # fmt: skip


def done(begin: int, end: int, *, epoch: int = 0, whole: bool = False, elapsed_s: float = 0.0) -> DoneRecord:
    part = DataRange(stream=0, epoch=epoch, begin=begin, end=end)
    return DoneRecord(range=part, whole_epoch=whole, elapsed_s=elapsed_s)


def replay_of(path: Path, *records: Record) -> Replay:
    """Append, close, and start again."""
    with Journal(path) as journal:
        journal.start()
        journal.append(records)
    with Journal(path) as journal:
        return journal.start()


def test_each_start_has_a_higher_generation(tmp_path: Path) -> None:
    """Members follow the highest generation and refuse lower ones."""
    for expected in (1, 2, 3):
        with Journal(tmp_path / "state.db") as journal:
            assert journal.start().generation == expected


def test_every_kind_of_record_comes_back(tmp_path: Path) -> None:
    """What the state emitted is what a restart gets, field by field."""
    world = World()
    world.initialised(servers=2)
    shard_map = world.state.model.shard_map
    assert shard_map is not None
    spec = StreamSpec(stream=0, length=100, seed=7, epochs=3, shuffle=False)
    job = JobRecord(state=JobState.RUNNING, gate_open=True, workers_seen=3, workers_undone=1, elapsed_s=2.0)
    a_map = MapRecord(shard_map=shard_map, initialiser=Incarnation(2))
    replay = replay_of(
        tmp_path / "state.db",
        IdsRecord(reserved_end=65), member(2), member(10), job, a_map, StreamRecord(spec=spec), done(0, 10),
        NumberRecord(name="accuracy", value=0.5),
    )  # fmt: skip
    assert replay == Replay(
        generation=2, reserved_end=65, job=job, members=[member(2), member(10)], map=a_map, streams=[spec],
        done=[done(0, 10).range], numbers={"accuracy": 0.5},
    )  # fmt: skip


def test_newer_records_replace_older_ones(tmp_path: Path) -> None:
    """One row per member, number and job; a pruned member is gone."""
    replay = replay_of(
        tmp_path / "state.db",
        member(1), member(1, state=MemberState.DEAD), member(2), MemberPruned(incarnation=Incarnation(2)),
        NumberRecord(name="a", value=1.0), NumberRecord(name="a", value=2.0),
    )  # fmt: skip
    assert replay.members == [member(1, state=MemberState.DEAD)]
    assert replay.numbers == {"a": 2.0}


def test_a_complete_epoch_is_one_row(tmp_path: Path) -> None:
    """The file does not grow with every batch for ever; other epochs (12 is not 1) keep their rows."""
    replay = replay_of(
        tmp_path / "state.db",
        done(0, 10, epoch=1), done(10, 20, epoch=1), done(0, 10, epoch=12), done(0, 20, epoch=1, whole=True),
    )  # fmt: skip
    assert [(part.epoch, part.begin, part.end) for part in replay.done] == [(12, 0, 10), (1, 0, 20)]


def test_training_time_survives(tmp_path: Path) -> None:
    """The newest of all recorded durations counts."""
    replay = replay_of(
        tmp_path / "state.db", JobRecord(state=JobState.RUNNING, elapsed_s=1.0), done(0, 1, elapsed_s=5.0)
    )
    assert replay.job == JobRecord(state=JobState.RUNNING, elapsed_s=5.0)


def test_a_second_coordinator_on_the_same_file_is_refused(tmp_path: Path) -> None:
    """Two coordinators would hand out the same incarnations; the lock is free again after a close."""
    path = tmp_path / "state.db"
    with Journal(path), pytest.raises(ConfigError, match="in use by another coordinator"):
        Journal(path)
    Journal(path).close()


def test_a_batch_is_stored_whole_or_not_at_all(tmp_path: Path) -> None:
    """A record that can't be written takes its batch along, and the journal still works."""
    path = tmp_path / "state.db"
    with Journal(path) as journal:
        journal.start()
        with pytest.raises(TypeError):
            journal.append([member(1), NumberRecord(name="bad", value=object())])  # type: ignore[arg-type]
        journal.append([member(2)])
    with Journal(path) as journal:
        assert journal.start().members == [member(2)]


def test_only_the_owner_may_read_the_file(tmp_path: Path) -> None:
    """It holds secrets."""
    with Journal(tmp_path / "state.db"):
        assert stat.S_IMODE((tmp_path / "state.db").stat().st_mode) == 0o600


def test_foreign_files_are_refused_by_name(tmp_path: Path) -> None:
    """A file that is no database, one of a newer format, and a folder that does not exist."""
    noise = tmp_path / "noise"
    noise.write_bytes(b"no database at all" * 100)
    with pytest.raises(ConfigError, match="noise is not a coordinator's state file"):
        Journal(noise)
    foreign = tmp_path / "foreign.db"
    with sqlite3.connect(foreign) as db:
        db.execute("CREATE TABLE photos (name TEXT)")
    db.close()
    before = foreign.read_bytes()
    with pytest.raises(ConfigError, match=r"foreign\.db is a database of something else"):
        Journal(foreign)
    assert foreign.read_bytes() == before
    newer = tmp_path / "newer.db"
    with sqlite3.connect(newer) as db:
        db.execute(f"PRAGMA user_version={FORMAT + 1}")
    db.close()
    with pytest.raises(ConfigError, match=f"has format {FORMAT + 1}, this version reads {FORMAT}"):
        Journal(newer)
    with pytest.raises(ConfigError, match="can't be opened"):
        Journal(tmp_path / "missing" / "state.db")
