"""What holds for every test: fixed seeds, and nothing left behind (threads, child processes, environment)."""

from __future__ import annotations

import os
import random
import sys
from collections.abc import Iterator

import pytest
from hypothesis import settings

from tests.support.leaks import Running, environment

# Before torch is imported, and for every process that tests start: several processes with several threads each on few
# cores spend their time waiting for one another.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# The same examples in each run; `--hypothesis-profile=default` looks at others. No deadline: the machine may be busy.
settings.register_profile("repeatable", derandomize=True, database=None, deadline=None)
settings.load_profile("repeatable")


@pytest.fixture(autouse=True)
def _seeds() -> None:
    """The same random numbers in each run and in any order of tests."""
    random.seed(0)
    for name in ("numpy", "torch"):
        module = sys.modules.get(name)
        if module is not None:  # a test that does not load torch should not pay for it
            (module.random.seed if name == "numpy" else module.manual_seed)(0)


@pytest.fixture(autouse=True)
def _same_environment() -> Iterator[None]:
    """Fail a test that leaves environment variables changed."""
    before = environment()
    yield
    changed = [key for key in sorted(before.keys() | environment().keys()) if before.get(key) != environment().get(key)]
    if changed:
        pytest.fail(f"environment variables left changed: {', '.join(changed)}", pytrace=False)


@pytest.fixture(autouse=True, scope="module")
def _nothing_running() -> Iterator[None]:
    """Fail a file of tests that leaves threads or child processes: its tests may share them, the next file may not."""
    before = Running.now()
    yield
    left = before.left_since(settle_s=5.0)
    if left:
        pytest.fail("left running: " + "; ".join(left), pytrace=False)
