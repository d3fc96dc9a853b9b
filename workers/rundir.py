"""The run folder: what `psctl local` leaves behind. Torch-free.

coordinator          host:port, as soon as the coordinator listens
coordinator.sqlite   the coordinator's state
logs/NAME.log        output of each process
errors/NAME.json     how a worker's script failed
summary.json         how the job ended
model.safetensors    the trained parameters
"""

from __future__ import annotations

import json
import time
from dataclasses import asdict, dataclass
from pathlib import Path

from ps.errors import ConfigError

COORDINATOR = "coordinator"
STATE = "coordinator.sqlite"
SUMMARY = "summary.json"
MODEL = "model.safetensors"

_TRIES = 1000
"""Launchers that may start within one second, each with a folder of its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """How a script failed, as its process wrote it down."""

    name: str
    """The worker's name."""
    exit_code: int
    error: str
    """One line, e.g. `ValueError: bad shape`."""
    traceback: str
    """As Python prints it; empty for `sys.exit`."""


def create(wanted: Path | None) -> Path:
    """Make the run folder, `runs/<time>` when `wanted` is None, and return it as an absolute path.

    Raises `ConfigError` when it already holds a run or can't be made.
    """
    try:
        return _create(wanted).resolve()
    except OSError as error:
        raise ConfigError(f"the run folder can't be made: {error}") from None


def _create(wanted: Path | None) -> Path:
    if wanted is not None:
        wanted.mkdir(parents=True, exist_ok=True)
        if (wanted / STATE).exists() or (wanted / SUMMARY).exists():
            raise ConfigError(f"--run-dir {wanted} already holds a run; choose another folder")
        folder = wanted
    else:
        folder = _unique(Path("runs"), time.strftime("%Y%m%d-%H%M%S"))
    (folder / "logs").mkdir(exist_ok=True)
    (folder / "errors").mkdir(exist_ok=True)
    return folder


def _unique(parent: Path, name: str) -> Path:
    parent.mkdir(exist_ok=True)
    for number in range(1, _TRIES):
        folder = parent / (name if number == 1 else f"{name}-{number}")
        try:
            folder.mkdir()  # exclusive: of two launchers in one second, one goes on to the next number
        except FileExistsError:
            continue
        return folder
    raise ConfigError(f"there are {_TRIES} folders {parent / name}-* already; give --run-dir")


def log_file(folder: Path, name: str) -> Path:
    """Where a child's output goes."""
    return folder / "logs" / f"{name}.log"


def error_file(folder: Path, name: str) -> Path:
    """Where a worker writes how its script failed."""
    return folder / "errors" / f"{name}.json"


def write_failure(path: Path, failure: Failure) -> None:
    """Write down how a script failed; the file is there as a whole or not at all."""
    part = path.with_name(path.name + ".part")
    part.write_text(json.dumps(asdict(failure)))
    part.rename(path)


def first_failure(folder: Path, names: list[str]) -> Failure | None:
    """The failure that was written first, None when no script failed by itself."""
    found = [path for path in (error_file(folder, name) for name in names) if path.exists()]
    if not found:
        return None
    return Failure(**json.loads(min(found, key=lambda path: path.stat().st_mtime_ns).read_text()))


def failures_into_logs(folder: Path) -> None:
    """Append each script's traceback to its worker's log, once nobody shows that log any more."""
    for path in sorted((folder / "errors").glob("*.json")):
        failure = Failure(**json.loads(path.read_text()))
        with log_file(folder, failure.name).open("a") as log:
            log.write(failure.traceback)


def ensure_summary(folder: Path, outcome: str, reason: str) -> None:
    """Write `summary.json` in the coordinator's place if it could not: killed, or never up. Its numbers are then 0.

    All its keys are there, so that whoever reads it needs no second way.
    """
    path = folder / SUMMARY
    if path.exists():
        return
    numbers = ("samples", "seconds", "samples_per_s", "pushes", "pulls", "bytes_pushed", "bytes_pulled", "workers_seen")
    record: dict[str, object] = {"outcome": outcome, "reason": reason, **dict.fromkeys(numbers, 0)}
    record |= {"staleness": {"mean": 0.0, "max": 0, "histogram": {}}, "final": {}}
    path.write_text(json.dumps(record, indent=2) + "\n")


def read_summary(folder: Path) -> dict[str, object]:
    """`summary.json`; empty when it can't be read."""
    try:
        record = json.loads((folder / SUMMARY).read_text())
    except (OSError, ValueError):
        return {}
    return record if isinstance(record, dict) else {}
