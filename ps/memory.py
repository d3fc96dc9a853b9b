"""Memory settings that make big messages cheap; they must be in the environment before the process starts.

Receiving a message allocates a buffer of its size. By default each such buffer is mapped afresh, and its page faults
dominate the transfer: huge pages and a heap that keeps what was freed make it two to six times faster on loopback.

`psctl local` sets them for its children. `psctl server` and `psctl worker`, started by hand, start themselves again
with them, once and only where glibc is the allocator; `PS_KEEP_ENVIRONMENT=1` switches that off.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping

from ps.errors import ConfigError

HUGE_PAGES = "THP_MEM_ALLOC_ENABLE"
"""Read by torch: back big tensors with huge pages. A value that is already set is kept."""

TUNABLES = "GLIBC_TUNABLES"
"""Read by glibc when a process starts; entries `glibc.malloc.NAME=VALUE` with colons between."""

HEAP = {"glibc.malloc.mmap_max": "0", "glibc.malloc.trim_threshold": "4294967296"}
"""Big blocks come from the heap too, and freed memory (up to 4 GiB) stays with the process."""

KEEP = "PS_KEEP_ENVIRONMENT"


def is_glibc() -> bool:
    """Whether this process's C library is glibc, so that `TUNABLES` means anything."""
    try:
        return (os.confstr("CS_GNU_LIBC_VERSION") or "").startswith("glibc")
    except (ValueError, OSError):
        return False


def settings(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables to add to `environment`, so that the settings hold; what the user has set stays as it is.

    Empty when nothing is to be added: all is set, another allocator is preloaded, or the C library is another one.
    """
    if not is_glibc() or "malloc" in environment.get("LD_PRELOAD", ""):
        return {}
    added = {} if environment.get(HUGE_PAGES) else {HUGE_PAGES: "1"}
    entries = [entry for entry in environment.get(TUNABLES, "").split(":") if entry]
    present = {entry.partition("=")[0] for entry in entries}
    missing = [f"{name}={value}" for name, value in HEAP.items() if name not in present]
    if missing:
        added[TUNABLES] = ":".join([*entries, *missing])
    return added


def restart_with_settings(environment: Mapping[str, str]) -> None:
    """Replace this process by itself with the settings in its environment, if any is missing and it may be done.

    Returns when there is nothing to do. Call it before torch is imported and before any thread runs. The process id,
    open files and arguments stay the same, so nothing that started this process notices.
    """
    if environment.get(KEEP, "") not in ("", "0"):
        return
    added = settings(environment)
    if not added:
        return
    if "torch" in sys.modules:
        raise ConfigError("memory settings must be in place before torch is imported")
    sys.stdout.flush()
    sys.stderr.flush()
    os.execve(sys.executable, [sys.executable, *sys.orig_argv[1:]], {**environment, **added})
