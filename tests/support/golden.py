"""A training script for clusters: trains one case of `tests.numerics.cases` and leaves its weights on the servers."""

from __future__ import annotations

import sys

import workers
from tests.numerics.cases import run

if __name__ == "__main__":
    with workers.join() as worker:
        run(sys.argv[1], worker.attach)
