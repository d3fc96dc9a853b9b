"""The loop of every driver: read commands from standard input, time steps, answer on standard output.

Commands are JSON lines: `{"run": STEPS}` is answered by `{"seconds": S}`, `{"check": STEPS}` (steps so far, of all
workers together) by `{"ok": true|false, "got": …}`. The end of the input ends the driver.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable


def say(**record: object) -> None:
    """Answer the parent."""
    sys.stdout.write(json.dumps(record) + "\n")
    sys.stdout.flush()


def serve(step: Callable[[], object], check: Callable[[int], object]) -> None:
    """Answer commands until the input ends. `check` returns the value that `STEPS` steps have led to, which is then
    compared with -0.1 * STEPS: every driver subtracts 0.1 times a gradient of ones in each step."""
    say(ready=True)
    for line in sys.stdin:
        command = json.loads(line)
        if "run" in command:
            say(seconds=timed(step, int(command["run"])))
        else:
            steps = int(command["check"])
            got = check(steps)
            say(ok=right(got, steps), got=got)


def timed(step: Callable[[], object], steps: int) -> float:
    """Seconds that `steps` steps take."""
    began = time.perf_counter()
    for _ in range(steps):
        step()
    return time.perf_counter() - began


def right(got: object, steps: int) -> bool:
    """Whether all values in `got` are what `steps` steps make of zero, up to float32's rounding."""
    values = got if isinstance(got, list) else [got]
    return all(isinstance(value, float) and abs(value + 0.1 * steps) <= 1e-4 * max(1, steps) for value in values)


def wait_for_end() -> None:
    """For drivers that only serve others."""
    for _ in sys.stdin:
        pass
