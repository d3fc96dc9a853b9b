#!/usr/bin/env bash
# Everything that needs a GPU, in under 5 minutes: tests, then how fast gradients and weights move.
# PYTHON chooses an interpreter that has torch for CUDA and this project's dependencies (pytest and pytest-timeout too).
set -euo pipefail
cd "$(dirname "$0")/../.."
PYTHON=${PYTHON:-python3}
export PYTHONPATH="$PWD${PYTHONPATH:+:$PYTHONPATH}"
"$PYTHON" -c 'import sys, torch; print(sys.version.split()[0], torch.__version__, *[torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())])'
"$PYTHON" -c 'import sys, torch; sys.exit(0 if torch.cuda.is_available() else "no CUDA device: nothing to run")'
timeout 240 "$PYTHON" -m pytest tests/gpu -q --timeout=120 "$@"
timeout 50 "$PYTHON" -m tests.gpu.timing
