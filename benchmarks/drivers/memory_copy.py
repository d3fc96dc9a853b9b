"""Limit: copying a model's bytes twice (once for push, once for pull) within one process."""

from __future__ import annotations

import argparse

import torch
from serve import serve


def main() -> None:
    """Serve steps of two copies."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--nbytes", type=int, required=True)
    options = parser.parse_args()
    torch.set_num_threads(1)
    weights, wire = torch.zeros(options.nbytes // 4), torch.ones(options.nbytes // 4)

    def step() -> None:
        wire.copy_(weights)
        weights.copy_(wire)

    serve(step, lambda steps: -0.1 * steps)


if __name__ == "__main__":
    main()
