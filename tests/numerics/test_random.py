"""Any model, optimizer and course of training out of these ingredients: bit by bit what plain PyTorch makes of it."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from ps import alone
from tests.numerics.compare import distance
from tests.support.oracle import plain
from tests.support.programs import DTYPES, KINDS, Event, Layer, Program, train
from workers import Worker
from workers.config import WorkerConfig

EXAMPLES = int(os.environ.get("PS_EXAMPLES", "0"))
"""Set it to look at that many others each time, for as long as it takes."""

SPARSE = ("SGD", "Adagrad", "SparseAdam")
TABLES = ("table", "tied table")

HALF = ("float16", "bfloat16")

decay = st.sampled_from([0.0, 0.01])
flag = st.booleans()

OPTIONS: dict[str, dict[str, st.SearchStrategy[Any]]] = {
    "SGD": {"momentum": st.sampled_from([0.0, 0.9]), "weight_decay": decay, "maximize": flag},
    "Adam": {"weight_decay": decay, "amsgrad": flag, "maximize": flag},
    "AdamW": {
        "weight_decay": decay,
        "amsgrad": flag,
        "maximize": flag,
        "betas": st.sampled_from([(0.9, 0.99), (0.0, 0.0)]),
    },
    "Adagrad": {"lr_decay": decay, "weight_decay": decay, "initial_accumulator_value": decay, "maximize": flag},
    "RMSprop": {"momentum": st.sampled_from([0.0, 0.9]), "centered": flag, "weight_decay": decay, "maximize": flag},
    "Adadelta": {"weight_decay": decay, "maximize": flag},
    "Adamax": {"weight_decay": decay, "maximize": flag},
    "NAdam": {"weight_decay": decay, "decoupled_weight_decay": flag, "maximize": flag},
    "RAdam": {"weight_decay": decay, "decoupled_weight_decay": flag, "maximize": flag},
    "ASGD": {"t0": st.sampled_from([1.0, 3.0]), "weight_decay": decay, "maximize": flag},
    "Rprop": {"etas": st.sampled_from([(0.5, 1.2), (0.4, 1.5)]), "maximize": flag},
    "Adafactor": {"weight_decay": decay, "maximize": flag},
    "Muon": {"weight_decay": decay, "nesterov": flag, "ns_steps": st.sampled_from([2, 5])},
    "SparseAdam": {"maximize": flag},
}

events = st.builds(
    Event,
    forgets_zero_grad=flag,
    skips_backward=st.sampled_from([False, False, False, True]),
    lr_factor=st.sampled_from([1.0, 1.0, 0.5, 0.0]),
    absent=st.none() | st.integers(0, 20),
    flips=st.none() | st.integers(0, 20),
    clips=flag,
)


@st.composite
def layers(draw: st.DrawFn, *, tables: bool) -> Layer:
    kind = draw(st.sampled_from(KINDS if tables else [kind for kind in KINDS if kind not in TABLES]))
    dtypes = list(DTYPES)
    if "table" in kind:  # torch has no complex tables; rows in 16 bits are rounded once more, see the table of cases
        dtypes = ["float32", "float64"] if kind in TABLES else [name for name in DTYPES if "complex" not in name]
    return Layer(kind, draw(st.sampled_from(dtypes)), draw(st.integers(1, 7)))


@st.composite
def programs(draw: st.DrawFn) -> Program:
    optimizer = draw(st.sampled_from(sorted(OPTIONS)))
    drawn = tuple(draw(st.lists(layers(tables=optimizer in SPARSE), max_size=4)))
    options = {key: draw(value) for key, value in OPTIONS[optimizer].items()}
    rows = any(layer.kind in TABLES for layer in drawn)
    if rows and "weight_decay" in options:
        options["weight_decay"] = 0.0  # refused
    if options.get("momentum") and optimizer == "SGD":
        options["nesterov"] = draw(flag)
        options["dampening"] = 0.0 if options["nesterov"] else draw(st.sampled_from([0.0, 0.5]))
    half = any(layer.dtype in HALF for layer in drawn)
    accumulate = draw(st.sampled_from([1, 1, 1, 2])) if not half else 1  # the oracle can't do both
    group = st.fixed_dictionaries({"lr": st.sampled_from([0.01, 0.003, 0.1])})
    return Program(
        layers=drawn,
        optimizer=optimizer,
        options=tuple(options.items()),
        groups=tuple(draw(st.lists(group, min_size=1, max_size=3))),
        left_out=draw(st.none() | st.integers(0, 4)),
        events=tuple(draw(st.lists(events, min_size=4, max_size=8).filter(lambda found: len(found) % accumulate == 0))),
        accumulate=accumulate,
        servers=draw(st.integers(1, 3)),
        shard_bytes=draw(st.sampled_from([64, 128, 0])),
        message_bytes=draw(st.sampled_from([100, 8 << 20])),
    )


def bound(program: Program) -> float:
    """0 is bitwise. SGD adds rows that occur twice one by one in plain PyTorch; see the table of cases."""
    return 1e-4 if program.optimizer == "SGD" and any(layer.kind in TABLES for layer in program.layers) else 0.0


def served(program: Program) -> dict[str, torch.Tensor] | None:
    """Parameters and buffers after training on servers; the former as they lie there."""
    job = alone.LocalJob(servers=program.servers, settings=alone.settings(exact=True, shard_bytes=program.shard_bytes))
    with Worker(job.member(), WorkerConfig(message_bytes=program.message_bytes)) as worker:
        model = train(program, worker.attach)
        if model is not None:
            worker.pull()
        return None if model is None else {key: value.clone() for key, value in model.state_dict().items()}


@pytest.mark.timeout(600)  # shrinking what fails takes its time
@settings(max_examples=EXAMPLES or 100, derandomize=not EXAMPLES)
@given(programs())
def test_any_program_is_bitwise_plain_pytorch(program: Program) -> None:
    """Four to eight steps over one to three servers, exact kernels: parameters and buffers have the same bits."""
    expected = train(program, plain)
    assume(expected is not None)
    assert expected is not None
    wanted = expected.state_dict()
    assume(all(bool(value.isfinite().all()) for value in wanted.values()))
    got = served(program)
    assert got is not None
    assert distance(got, wanted) <= bound(program)
