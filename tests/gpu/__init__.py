"""What only a machine with a CUDA device can show; skipped elsewhere. `tests/gpu/run.sh` runs it in a few minutes."""
