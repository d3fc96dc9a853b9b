"""Every learning-rate scheduler of torch that goes by steps, alone and in chains."""

from __future__ import annotations

from collections.abc import Callable

from torch.optim import Optimizer, lr_scheduler
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.swa_utils import SWALR

MAKERS: dict[str, Callable[[Optimizer], LRScheduler]] = {
    "lambda": lambda o: lr_scheduler.LambdaLR(o, lambda step: 0.9**step),
    "multiplicative": lambda o: lr_scheduler.MultiplicativeLR(o, lambda step: 0.9),
    "step": lambda o: lr_scheduler.StepLR(o, 3),
    "multi_step": lambda o: lr_scheduler.MultiStepLR(o, [2, 5]),
    "constant": lambda o: lr_scheduler.ConstantLR(o, total_iters=3),
    "linear": lambda o: lr_scheduler.LinearLR(o, total_iters=5),
    "exponential": lambda o: lr_scheduler.ExponentialLR(o, 0.9),
    "polynomial": lambda o: lr_scheduler.PolynomialLR(o, 10),
    "cosine": lambda o: lr_scheduler.CosineAnnealingLR(o, 5),
    "cosine_restarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 3),
    "cyclic": lambda o: lr_scheduler.CyclicLR(o, 0.01, 0.1, step_size_up=3),
    "one_cycle": lambda o: lr_scheduler.OneCycleLR(o, 0.5, total_steps=20),
    "sequential": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o, total_iters=4), lr_scheduler.CosineAnnealingLR(o, 9)], [4]
    ),
    "chained": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(o, total_iters=4), lr_scheduler.ExponentialLR(o, 0.9)]
    ),
    "averaging": lambda o: SWALR(o, 0.05, anneal_epochs=4),
}
