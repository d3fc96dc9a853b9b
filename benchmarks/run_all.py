"""Run the benchmarks one after the other and show all ratios beside their targets.

    python benchmarks/run_all.py            # everything: tens of minutes, more contenders, all links
    python benchmarks/run_all.py --quick    # a first look, under a minute each

Shaped links need root; without it they are skipped and named.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).parent

QUICK = (
    ("server_apply", "--quick"),
    ("small_model", "--quick"),
    ("push_pull", "--mb", "100", "--quick"),
)

FULL = (
    ("server_apply",),
    ("small_model",),
    *(("push_pull", "--mb", mb) for mb in ("1", "10", "100", "400")),
    ("push_pull", "--mb", "100", "--servers", "2"),
    *(("push_pull", "--mb", "100", "--message-mb", size, "--quick") for size in ("1", "2", "4", "16", "31")),
    ("push_pull", "--mb", "100", "--allocation", "default"),
    ("push_pull", "--mb", "10", "--link", "100mbit", "--rounds", "5"),
    ("push_pull", "--mb", "100", "--link", "1gbit", "--rounds", "5"),
    ("push_pull", "--mb", "100", "--link", "10gbit"),
    ("overlap",),
    ("codecs",),
    ("scaling",),
)

TIMEOUT_S = 1200


def main() -> int:
    """Run; the exit code is 1 if any benchmark failed. Ratios below their targets are shown, not failures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--only", default="", help="run only benchmarks whose command contains this")
    options = parser.parse_args()
    lines, failed = [], False
    for script, *arguments in QUICK if options.quick else FULL:
        what = " ".join([script, *arguments])
        if options.only not in what:
            continue
        if "--link" in arguments and os.geteuid() != 0:
            lines.append(f"{what}: skipped, shaped links need root")
            continue
        sys.stdout.write(f"== {what}\n")
        sys.stdout.flush()
        found = _run(script, arguments)
        failed = failed or found is None
        lines += [f"{what}: {line}" for line in (["FAILED"] if found is None else found)]
    sys.stdout.write("\n".join(["", "== all ratios", *lines, ""]))
    return int(failed)


def _run(script: str, arguments: list[str]) -> list[str] | None:
    """Ratios of one benchmark; None when it failed."""
    with tempfile.TemporaryDirectory(prefix="ps-bench-") as folder:
        result = Path(folder) / "result.json"
        command = [sys.executable, str(HERE / f"{script}.py"), *arguments, "--json", str(result)]
        try:
            code = subprocess.run(command, timeout=TIMEOUT_S, check=False).returncode
        except subprocess.TimeoutExpired:
            return None
        if code or not result.exists():
            return None
        report = json.loads(result.read_text())
    targets = report["targets"]
    return [f"{name} {value:.3g} {targets.get(name, '')}".rstrip() for name, value in report["ratios"].items()]


if __name__ == "__main__":
    sys.exit(main())
