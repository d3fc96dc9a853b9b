"""`python -m tests.numerics [--write] [pytest arguments]`: run these tests and print what came out as a matrix.

`--write` puts it into MATRIX.md, if it is complete.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path


def main(arguments: list[str]) -> int:
    """Exit code: pytest's."""
    import pytest

    from tests.numerics.matrix import FILE, Matrix

    folder = Path(__file__).parent
    matrix = Matrix()
    write = "--write" in arguments
    chosen = [argument for argument in arguments if argument != "--write"]
    ignored = f"--ignore={folder / 'test_matrix.py'}"  # it checks the file that this run writes
    code = pytest.main([str(folder), "-q", "-m", "not slow", ignored, *chosen], plugins=[matrix])
    matrix.print()
    if write and code == 0 and matrix.complete:
        FILE.write_text(matrix.markdown())
    elif write:
        sys.stderr.write(f"{FILE.name} is left as it was: not all tests were run, or some failed\n")
        return int(code) or 1
    return int(code)


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # as for every test; read when torch is imported
    sys.exit(main(sys.argv[1:]))
