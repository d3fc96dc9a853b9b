"""The coordinator's memory on disk: one SQLite file, one row per thing, each batch of records one transaction.

WAL, `synchronous=FULL` and an exclusive lock for as long as the process lives: a second coordinator on the same file is
refused, and the lock is free again after kill -9. The `-wal` file beside it belongs to the state. The file holds
secrets, so only its owner may read it. A copied file or a network file system defeats the lock.
"""

from __future__ import annotations

import base64
import json
import os
import sqlite3
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TypeAlias

from ps.control import convert
from ps.control.api import DataRange, StreamSpec
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
from ps.v1 import types_pb2

FORMAT = 1
"""`PRAGMA user_version` of the file. Another one is refused."""

Row: TypeAlias = "tuple[str, str, Mapping[str, object]]"
"""(kind, key, body)."""


class Journal:
    """An open journal. One thread at a time; calls block on the disk."""

    def __init__(self, path: Path) -> None:
        """Open or create the file and take its lock. Raises `ConfigError` when that can't be."""
        self._path = path
        try:
            os.close(os.open(path, os.O_RDWR | os.O_CREAT, 0o600))
            self._db = sqlite3.connect(path, timeout=0, isolation_level=None, check_same_thread=False)
        except (OSError, sqlite3.Error) as error:
            raise ConfigError(f"--state {path} can't be opened: {error}") from error
        try:
            self._prepare()
        except sqlite3.OperationalError as error:
            self._db.close()
            if "locked" in str(error):
                raise ConfigError(
                    f"--state {path} is in use by another coordinator; stop it, or give this one its own file"
                ) from error
            raise ConfigError(f"--state {path} can't be used: {error}") from error
        except sqlite3.DatabaseError as error:
            self._db.close()
            raise ConfigError(f"--state {path} is not a coordinator's state file: {error}") from error
        except ConfigError:
            self._db.close()
            raise

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def start(self) -> Replay:
        """Count one more start of the coordinator, and read back what it knows."""
        rows = self._db.execute("SELECT kind, key, body FROM record ORDER BY rowid").fetchall()
        replay = Replay()
        for kind, _, body in rows:
            _LOADERS[kind](replay, json.loads(body))
        replay.members.sort(key=lambda record: record.incarnation)
        replay.streams.sort(key=lambda spec: spec.stream)
        self._transact([("generation", "", {"generation": replay.generation})])
        return replay

    def append(self, records: Sequence[Record]) -> None:
        """Store records, all or none; they are on disk when this returns. Raises `sqlite3.Error`."""
        self._transact([_row(record) for record in records])

    def close(self) -> None:
        """Let go of the file; idempotent."""
        self._db.close()

    def _prepare(self) -> None:
        # Order matters: with the exclusive mode set first, WAL needs no shared-memory file.
        self._db.execute("PRAGMA locking_mode=EXCLUSIVE")
        if self._db.execute("SELECT 1 FROM sqlite_master WHERE type = 'table' AND name != 'record'").fetchone():
            raise ConfigError(
                f"--state {self._path} is a database of something else; give the coordinator its own file"
            )
        self._db.execute("PRAGMA journal_mode=WAL")
        self._db.execute("PRAGMA synchronous=FULL")
        self._db.execute("BEGIN IMMEDIATE")
        (version,) = self._db.execute("PRAGMA user_version").fetchone()
        if version not in (0, FORMAT):
            raise ConfigError(
                f"--state {self._path} has format {version}, this version reads {FORMAT}; "
                "use the version that wrote it, or another file"
            )
        self._db.execute(
            "CREATE TABLE IF NOT EXISTS record (kind TEXT, key TEXT, body TEXT NOT NULL, PRIMARY KEY (kind, key))"
        )
        self._db.execute(f"PRAGMA user_version={FORMAT}")
        self._db.execute("COMMIT")

    def _transact(self, rows: Sequence[Row]) -> None:
        self._db.execute("BEGIN IMMEDIATE")
        try:
            for kind, key, body in rows:
                self._put(kind, key, body)
            self._db.execute("COMMIT")
        except BaseException:
            if self._db.in_transaction:
                self._db.execute("ROLLBACK")
            raise

    def _put(self, kind: str, key: str, body: Mapping[str, object]) -> None:
        if kind == "pruned":
            self._db.execute("DELETE FROM record WHERE kind = 'member' AND key = ?", (key,))
            return
        if kind == "done" and body["whole_epoch"]:
            prefix = f"{body['stream']}/{body['epoch']}/"
            self._db.execute("DELETE FROM record WHERE kind = 'done' AND substr(key, 1, ?) = ?", (len(prefix), prefix))
        self._db.execute("INSERT OR REPLACE INTO record VALUES (?, ?, ?)", (kind, key, json.dumps(body)))


def _row(record: Record) -> Row:
    match record:
        case IdsRecord():
            return "ids", "", {"reserved_end": record.reserved_end}
        case MemberRecord():
            return "member", str(record.incarnation), _member_body(record)
        case MemberPruned():
            return "pruned", str(record.incarnation), {}
        case JobRecord():
            return "job", "", _job_body(record)
        case MapRecord():
            raw = convert.shard_map_to_proto(record.shard_map).SerializeToString(deterministic=True)
            return "map", "", {"map": base64.b64encode(raw).decode(), "initialiser": record.initialiser}
        case StreamRecord(spec=s):
            body = {"length": s.length, "seed": s.seed, "epochs": s.epochs, "shuffle": s.shuffle, "stream": s.stream}
            return "stream", str(s.stream), body
        case DoneRecord(range=r):
            key = f"{r.stream}/{r.epoch}/{r.begin}"
            body = {"stream": r.stream, "epoch": r.epoch, "begin": r.begin, "end": r.end}
            return "done", key, {**body, "whole_epoch": record.whole_epoch, "elapsed_s": record.elapsed_s}
        case NumberRecord():
            return "number", record.name, {"name": record.name, "value": record.value}


def _member_body(record: MemberRecord) -> Mapping[str, object]:
    return {
        "incarnation": record.incarnation,
        "role": record.role.value,
        "name": record.name,
        "host": record.host,
        "pid": record.pid,
        "secret": record.secret.hex(),
        "nonce": record.nonce.hex(),
        "state": record.state.value,
        "address": record.address,
        "reason": record.reason,
    }


def _job_body(record: JobRecord) -> Mapping[str, object]:
    return {
        "state": record.state.value,
        "reason": record.reason,
        "exit_code": record.exit_code,
        "released": record.released,
        "gate_open": record.gate_open,
        "workers_seen": record.workers_seen,
        "workers_done": record.workers_done,
        "workers_undone": record.workers_undone,
        "elapsed_s": record.elapsed_s,
    }


# json gives no better type than this for what it reads.
Body: TypeAlias = "dict[str, object]"


def _load_generation(replay: Replay, body: Body) -> None:
    replay.generation = int(str(body["generation"])) + 1


def _load_ids(replay: Replay, body: Body) -> None:
    replay.reserved_end = int(str(body["reserved_end"]))


def _load_member(replay: Replay, body: Body) -> None:
    replay.members.append(
        MemberRecord(
            incarnation=Incarnation(int(str(body["incarnation"]))),
            role=Role(body["role"]),
            name=str(body["name"]),
            host=str(body["host"]),
            pid=int(str(body["pid"])),
            secret=bytes.fromhex(str(body["secret"])),
            nonce=bytes.fromhex(str(body["nonce"])),
            state=MemberState(body["state"]),
            address=str(body["address"]),
            reason=str(body["reason"]),
        )
    )


def _load_job(replay: Replay, body: Body) -> None:
    fields = dict(body)
    elapsed_s = max(replay.job.elapsed_s, float(str(fields.pop("elapsed_s"))))
    state = JobState(fields.pop("state"))
    replay.job = JobRecord(state=state, elapsed_s=elapsed_s, **fields)  # type: ignore[arg-type]  # as _job_body wrote


def _load_map(replay: Replay, body: Body) -> None:
    shard_map = types_pb2.ShardMap.FromString(base64.b64decode(str(body["map"])))
    initialiser = Incarnation(int(str(body["initialiser"]))) if body["initialiser"] is not None else None
    replay.map = MapRecord(shard_map=convert.shard_map_from_proto(shard_map), initialiser=initialiser)


def _load_stream(replay: Replay, body: Body) -> None:
    replay.streams.append(StreamSpec(**body))  # type: ignore[arg-type]  # as _row wrote


def _load_done(replay: Replay, body: Body) -> None:
    fields = {key: int(str(body[key])) for key in ("stream", "epoch", "begin", "end")}
    replay.done.append(DataRange(**fields))
    if float(str(body["elapsed_s"])) > replay.job.elapsed_s:
        _load_job(replay, {**_job_body(replay.job), "elapsed_s": body["elapsed_s"]})


def _load_number(replay: Replay, body: Body) -> None:
    replay.numbers[str(body["name"])] = float(str(body["value"]))


_LOADERS: Mapping[str, Callable[[Replay, Body], None]] = {
    "generation": _load_generation,
    "ids": _load_ids,
    "member": _load_member,
    "job": _load_job,
    "map": _load_map,
    "stream": _load_stream,
    "done": _load_done,
    "number": _load_number,
}
