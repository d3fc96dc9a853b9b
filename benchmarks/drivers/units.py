"""A worker of `slow_worker.py`: each batch takes so long; writes down when it had its first and its last one."""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import workers


class Numbers:
    """Samples are their own numbers."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> int:
        if not 0 <= index < self.length:
            raise IndexError(index)
        return index


def main() -> None:
    """Work off the data."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--batches", type=int, required=True)
    parser.add_argument("--unit-s", type=float, required=True)
    parser.add_argument("--slow", type=float, required=True)
    parser.add_argument("--loader-processes", type=int, required=True)
    options = parser.parse_args()
    with workers.join() as worker:
        unit_s = options.unit_s * (options.slow if worker.name == "worker-0" else 1)
        begins: list[float] = []
        for epoch in worker.epochs(Numbers(4 * options.batches), 4, num_workers=options.loader_processes):
            for _ in epoch:
                begins.append(time.monotonic())
                time.sleep(unit_s)  # stands in for the work
        record = {"unit_s": unit_s, "begin_s": begins[0], "end_s": begins[-1] + unit_s, "batches": len(begins)}
        (options.folder / f"{worker.name}.json").write_text(json.dumps(record))


if __name__ == "__main__":
    main()
