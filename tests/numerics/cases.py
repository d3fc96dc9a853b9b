"""The table of golden cases: what is trained on the servers and by plain PyTorch, and must come out the same.

A case is equal bit for bit under exact kernels, with one worker, or says by how much it may differ, and why.
`python -m tests.numerics` runs them and prints what came out.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn
from torch.optim import Optimizer

from tests.support import loops, nets
from tests.support.models import Mixed, Mlp, Moody, Strided, Tied, Waves, Words
from tests.support.optimizers import (
    adagrad,
    adam,
    adamw,
    adamw_fused,
    by_name,
    cast,
    double,
    grouped,
    muon,
    rmsprop,
    sgd_full,
    sgd_nesterov,
    sgd_plain,
    words_groups,
)
from tests.support.oracle import (
    Attach,
    Loop,
    accumulated,
    closures,
    expanded,
    plain,
    rows,
    rows_in_micro_batches,
    scaled,
    scheduled_after,
    scheduled_before,
    simple,
    thawed,
)

REPEATED_ROWS = "SGD adds rows that occur twice to the weights one by one; here they are summed before they are sent"
REPEATED_HALF_ROWS = "rows that occur twice are summed and sent in 16 bits; the oracle's master gets them in 32"
STRIDED_SUMS = "sums over a tensor in another memory order round differently; servers hold tensors row-major"

FUSED = "the oracle itself runs the fused kernel"


@dataclass(frozen=True)
class Case:
    """A run: what is built and how it is trained."""

    model: Callable[[], nn.Module]
    optimizer: Callable[[nn.Module], Optimizer]
    loop: Loop = simple
    splits: bool = True
    """Whether small shards split its tensors; optimizers that need whole ones are kept whole."""
    bound: float = 0.0
    """How far from plain PyTorch, relative and absolute, where exact kernels are not bitwise it; `because` says why."""
    because: str = ""


CASES: dict[str, Case] = {
    "sgd": Case(Mlp, sgd_plain),
    "sgd_momentum_decay": Case(Mlp, sgd_full),
    "sgd_nesterov": Case(Mlp, sgd_nesterov),
    "adam": Case(Mlp, adam),
    "adamw": Case(Mlp, adamw),
    "adagrad": Case(Mlp, adagrad),
    "rmsprop": Case(Mlp, rmsprop),
    "float64": Case(Mlp, double(adamw)),
    "groups": Case(Mlp, grouped),
    "scheduler_before_clipping": Case(Mlp, adamw, scheduled_before),
    "scheduler_after_clipping": Case(Mlp, sgd_full, scheduled_after),
    "scaler_inf_step": Case(Mlp, sgd_full, scaled),
    "closures": Case(Mlp, adam, closures),
    "accumulated": Case(Mlp, adam, accumulated),
    "thawed": Case(Mlp, adamw, thawed),
    "unused_frozen_scalar_adam": Case(Moody, adam),
    "unused_frozen_scalar_sgd": Case(Moody, sgd_full),
    "tied": Case(Tied, adamw),
    "strided": Case(Strided, sgd_full),
    "adadelta": Case(Mlp, by_name("Adadelta", lr=1.0, weight_decay=0.01)),
    "adamax": Case(Mlp, by_name("Adamax", lr=0.01, weight_decay=0.01)),
    "nadam": Case(Mlp, by_name("NAdam", lr=0.01, weight_decay=0.01, decoupled_weight_decay=True)),
    "radam": Case(Mlp, by_name("RAdam", lr=0.01, weight_decay=0.01)),
    "asgd": Case(Mlp, by_name("ASGD", lr=0.05, t0=10, weight_decay=0.01)),
    "rprop": Case(Mlp, by_name("Rprop", lr=0.01)),
    "adam_amsgrad_maximize": Case(Mlp, by_name("Adam", lr=0.001, amsgrad=True, maximize=True)),
    "sgd_maximize_dampening": Case(Mlp, by_name("SGD", lr=0.001, maximize=True, momentum=0.9, dampening=0.5)),
    "rmsprop_maximize": Case(Mlp, by_name("RMSprop", lr=0.001, maximize=True)),
    "adafactor": Case(Mlp, by_name("Adafactor", lr=0.05, weight_decay=0.01), splits=False),
    "adafactor_scalar_unused": Case(Moody, by_name("Adafactor", lr=0.05), splits=False),
    "adafactor_strided": Case(Strided, by_name("Adafactor", lr=0.05), splits=False, bound=1e-6, because=STRIDED_SUMS),
    "muon": Case(Mlp, muon, splits=False),
    "complex64": Case(Waves, adamw),
    "complex128_sgd": Case(partial(Waves, torch.complex128), double(sgd_full)),
    "bfloat16": Case(Mlp, cast(torch.bfloat16, adamw)),
    "bfloat16_sgd_unused": Case(Moody, cast(torch.bfloat16, sgd_full)),
    "float16": Case(Mlp, cast(torch.float16, adam)),
    "bfloat16_adafactor": Case(Mlp, cast(torch.bfloat16, by_name("Adafactor", lr=0.05)), splits=False),
    "mixed_dtypes": Case(Mixed, adamw),
    "expanded_gradients": Case(Strided, sgd_full, expanded),
    "sparse_sgd": Case(Words, sgd_plain, rows, bound=1e-6, because=REPEATED_ROWS),
    "sparse_sgd_momentum": Case(Words, sgd_nesterov, rows, bound=1e-5, because=REPEATED_ROWS),
    "sparse_adagrad": Case(Words, by_name("Adagrad", lr=0.05, lr_decay=0.01), rows),
    "sparse_adagrad_groups": Case(Words, words_groups, rows),
    "sparse_adagrad_bfloat16": Case(
        Words, cast(torch.bfloat16, by_name("Adagrad", lr=0.05)), rows, bound=1e-2, because=REPEATED_HALF_ROWS
    ),
    "sparse_adagrad_accumulate": Case(Words, by_name("Adagrad", lr=0.05), rows_in_micro_batches),
    "sparse_adam": Case(partial(Words, head=False), by_name("SparseAdam", lr=0.01), rows),
    "warm_up_chain_and_plateau": Case(Mlp, sgd_full, loops.warm_up_chain),
    "accumulate_5": Case(Mlp, adamw, loops.micro_batches),
    "accumulate_3_scaled": Case(Mlp, adam, loops.scaled_micro_batches),
    "nonfinite_skip": Case(Mlp, adamw, loops.nonfinite("skip")),
    "nonfinite_zero": Case(Mlp, sgd_full, loops.nonfinite("zero")),
    "no_backward_and_continue": Case(Mlp, adamw, loops.no_backward),
    "forgotten_zero_grad_backward_twice": Case(Mlp, sgd_full, loops.careless),
    "ema_norms_regulariser_after_step": Case(Mlp, adamw, loops.reads_back),
    "deepcopy_and_save_after_attach": Case(Mlp, adam, loops.distilled),
    "frozen_thawed_frozen": Case(Mlp, adamw, loops.flipped),
    "groups_of_all_kinds": Case(Mlp, loops.many_groups),
    "branching": Case(nets.Branching, adamw),
    "parametrizations": Case(nets.Parametrized, adam),
    "transformer_and_lstm": Case(nets.Attentive, sgd_full),
    "lazy_after_a_dry_run": Case(nets.lazy, adam),
    "autocast_bfloat16": Case(Mlp, adamw, loops.autocast),
    "scaler_unscale_clip_hook": Case(Mlp, adamw_fused, loops.scaled_and_clipped, bound=1e-6, because=FUSED),
    "checkpointed": Case(nets.Checkpointed, adamw),
    "compiled_before": Case(nets.compiled, adamw),
    "compiled_after": Case(Mlp, adamw, loops.compiled_after),
    "data_parallel": Case(nets.parallel, adamw),
    "batchnorm": Case(nets.Normed, adamw, loops.normed()),
    "batchnorm_latest_every_3": Case(nets.Normed, sgd_full, loops.normed(buffers="latest", buffers_every=3)),
    "batchnorm_local_and_average": Case(nets.Normed, adam, loops.normed(buffers={"second": "local"}, buffers_every=7)),
    "batchnorm_accumulate": Case(nets.Normed, adam, loops.normed(accumulate=2)),
    "state_read_back": Case(Mlp, adamw, loops.reads_state),
    "attached_midway_amsgrad": Case(Mlp, by_name("Adam", lr=0.01, amsgrad=True), loops.attached_midway),
    "attached_midway_nadam_unused": Case(Moody, by_name("NAdam", lr=0.01), loops.attached_midway),
    "attached_midway_rmsprop": Case(Mlp, rmsprop, loops.attached_midway),
    "attached_midway_adafactor": Case(Mlp, by_name("Adafactor", lr=0.05), loops.attached_midway, splits=False),
    "functional_call": Case(Mlp, adam, loops.functional),
}
"""By name, so that a script in another process can run one."""


def run(name: str, attach: Attach = plain) -> nn.Module:
    """Train the case of this name and return the model. The caller pulls the weights if they are elsewhere."""
    case = CASES[name]
    torch.manual_seed(7)
    model = case.model()
    case.loop(model, case.optimizer(model), attach)
    return model
