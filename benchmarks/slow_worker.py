"""How much a slow worker holds up a job at its end: real processes and leases, work that is slept.

    python benchmarks/slow_worker.py --slow 20 --loader-processes 2

Prints the job's time, from the first batch to the last, over the time that no schedule can beat: all workers busy from
their first batch on to the very end. `tests/unit/workers/test_slow_worker.py` shows the same on virtual time.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

DRIVER = Path(__file__).parent / "drivers" / "units.py"


def main() -> None:
    """Parse, run a job, report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=3, help="one of them is slow")
    parser.add_argument("--slow", type=float, default=20.0, help="how many times slower it is")
    parser.add_argument("--batches", type=int, default=400)
    parser.add_argument("--unit-s", type=float, default=0.05, help="time for a batch of the others")
    parser.add_argument("--loader-processes", type=int, default=0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        run(options, Path(folder))
        records = [json.loads(path.read_text()) for path in sorted(Path(folder).glob("worker-*.json"))]
    first_s = min(record["begin_s"] for record in records)
    took_s = max(record["end_s"] for record in records) - first_s
    best_s = ideal_s(records, options.batches) - first_s
    for number, record in enumerate(records):
        print(f"worker {number}: {record['batches']} batches of {record['unit_s']:g} s")
    print(f"job {took_s:.2f} s, ideal {best_s:.2f} s: {took_s / best_s:.3f} times")


def run(options: argparse.Namespace, folder: Path) -> None:
    """One `psctl local`; raises `CalledProcessError` when it fails."""
    job = [f"--batches={options.batches}", f"--unit-s={options.unit_s}", f"--slow={options.slow}"]
    local = ["local", f"--workers={options.workers}", f"--run-dir={folder / 'run'}"]
    command = [sys.executable, "-m", "workers", *local, str(DRIVER), str(folder), *job]
    subprocess.run([*command, f"--loader-processes={options.loader_processes}"], check=True, stdout=subprocess.DEVNULL)


def ideal_s(records: list[dict[str, float]], batches: int) -> float:
    """When the last batch could have ended: sum over workers of (end - begin) / unit is the number of batches."""
    rates = [1 / record["unit_s"] for record in records]
    done = sum(rate * record["begin_s"] for rate, record in zip(rates, records, strict=True))
    return (batches + done) / sum(rates)


if __name__ == "__main__":
    main()
