"""A process that outlives a killed launcher just long enough to kill what the launcher has started.

Standard library only and run as a file (`python -I -S keeper.py`), so that it costs a few milliseconds and megabytes.
It reads `+PGID` and `-PGID` lines from its standard input. When the input ends, the launcher is gone, and every process
group still on the list gets SIGKILL. A process apart does what a thread or PR_SET_PDEATHSIG in each child could not: it
reaches children that are frozen or hold the GIL, and the children of children.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Iterable


def remaining(lines: Iterable[str]) -> list[int]:
    """Process groups that were put on the list and not taken off again, in the order they came."""
    groups: dict[int, None] = {}
    for line in lines:
        sign, number = line[:1], line[1:].strip()
        if not number.isdigit() or int(number) <= 1:
            continue  # a line cut off by the launcher's death; 0 and 1 must never reach killpg
        if sign == "+":
            groups[int(number)] = None
        elif sign == "-":
            groups.pop(int(number), None)
    return list(groups)


def main() -> None:
    """Wait for the launcher's end, then kill what is left."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    for group in remaining(sys.stdin):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(group, signal.SIGKILL)


if __name__ == "__main__":
    main()
