"""What is refused, by name: what a script does, the error's class, and the words that must be in it.

`attach` refuses before anything is opened, and leaves the optimizer as it was.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.autograd import backward
from torch.optim import LBFGS, SGD, Adafactor, Adagrad, Adam, AdamW, Muon, Optimizer, SparseAdam
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils.data import IterableDataset

from ps.alone import LocalJob
from ps.errors import ConfigError, LocalWeightEdit, ModelError, NonFiniteGradient, UnsupportedError
from workers import Worker
from workers.config import WorkerConfig


class DoubleStep(SGD):
    """Changes what a step means."""

    def step(self, closure: object = None) -> None:  # type: ignore[override]
        super().step()
        super().step()


class FromScratch(Optimizer):
    """No class of torch.optim."""

    def __init__(self, params: object) -> None:
        super().__init__(params, {"lr": 0.1})  # type: ignore[arg-type]

    def step(self, closure: object = None) -> None:  # type: ignore[override]
        """Nothing."""


class Lambs(nn.Module):
    """Two parameters over one memory."""

    def __init__(self) -> None:
        super().__init__()
        memory = torch.zeros(10)
        self.a = nn.Parameter(memory[:6])
        self.b = nn.Parameter(memory[4:])


def sgd(model: nn.Module) -> Optimizer:
    return SGD(model.parameters(), lr=0.1)


def with_state(model: nn.Module, **extra: object) -> Optimizer:
    """After a step, with more in its state of each parameter."""
    optimizer = Adam(model.parameters())
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    optimizer.step()
    for state in optimizer.state.values():
        state.update(extra)
    return optimizer


def replaced_step(model: nn.Module) -> Optimizer:
    optimizer = sgd(model)
    optimizer.step = lambda closure=None: None  # type: ignore[method-assign,assignment]
    return optimizer


def foreign(model: nn.Module) -> Optimizer:
    params: list[torch.Tensor] = [*model.parameters(), nn.Parameter(torch.zeros(7))]
    return SGD(params, lr=0.1)


def words() -> nn.Module:
    return nn.Sequential(nn.Embedding(3, 2, sparse=True))


def integers() -> nn.Module:
    frozen = nn.Parameter(torch.zeros(2, dtype=torch.int8), requires_grad=False)
    return nn.ParameterList([nn.Parameter(torch.zeros(2)), frozen])


def eight_bits() -> nn.Module:
    return nn.ParameterList([nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(2).to(torch.float8_e4m3fn))])


def expanded() -> nn.Module:
    return nn.ParameterList([nn.Parameter(torch.zeros(1).expand(3))])


@dataclass(frozen=True)
class Refusal:
    """Something that is not served."""

    act: Callable[[Worker], object]
    error: type[Exception]
    words: str


def at_attach(
    model: Callable[[], nn.Module], optimizer: Callable[[nn.Module], Optimizer], error: type[Exception], words: str
) -> Refusal:
    """Refused before anything is opened."""

    def act(worker: Worker) -> None:
        module = model()
        worker.attach(module, optimizer(module))

    return Refusal(act, error, words)


def linear() -> nn.Module:
    return nn.Linear(2, 2)


def option(error: type[Exception], words: str, **options: Any) -> Refusal:
    """An option of `attach` that makes no sense."""
    return Refusal(lambda worker: worker.attach(model := linear(), sgd(model), **options), error, words)


def later(act: Callable[[Worker, nn.Module, Optimizer], object], error: type[Exception], words: str) -> Refusal:
    """Refused once a model of two layers, the second of rows, is attached and has made a step."""

    def attach_and_act(worker: Worker) -> None:
        model = nn.ModuleList([nn.Linear(2, 2), nn.Embedding(3, 2, sparse=True)])
        optimizer = worker.attach(model, sgd(model))
        train_step(model, optimizer)
        act(worker, model, optimizer)

    return Refusal(attach_and_act, error, words)


def gradients(model: nn.Module, factor: float = 1.0) -> None:
    """Of both layers."""
    dense, rows = model.children()
    backward(dense(rows(torch.tensor([0, 2, 2]))).square().sum() * factor)


def train_step(model: nn.Module, optimizer: Optimizer, factor: float = 1.0) -> None:
    gradients(model, factor)
    optimizer.step()
    optimizer.zero_grad()


def edit(worker: Worker, model: nn.Module, optimizer: Optimizer) -> None:
    with torch.no_grad():
        next(model.parameters()).clamp_(-0.1, 0.1)
    train_step(model, optimizer)


def load(worker: Worker, model: nn.Module, optimizer: Optimizer) -> None:
    model.load_state_dict({name: torch.ones_like(value) for name, value in model.state_dict().items()})
    train_step(model, optimizer)


def swap(index: int) -> Callable[[Worker, nn.Module, Optimizer], None]:
    """Give one parameter a gradient of the other kind: rows to the layer, elements to the table."""

    def act(worker: Worker, model: nn.Module, optimizer: Optimizer) -> None:
        gradients(model)
        param = list(model.parameters())[index]
        assert param.grad is not None
        param.grad = param.grad.to_sparse(1)
        optimizer.step()

    return act


def tied_head(worker: Worker) -> None:
    """A table whose weight is a dense layer's, too, under an optimizer that takes rows only."""
    model = nn.Embedding(3, 2, sparse=True)
    optimizer = worker.attach(model, SparseAdam(model.parameters()))
    backward((model.weight @ torch.ones(2)).sum())
    optimizer.step()


def two_optimizers(worker: Worker) -> None:
    """As the script of a GAN has them: one for the generator, one for the discriminator."""
    for model in (linear(), linear()):
        worker.attach(model, sgd(model))


def twice(worker: Worker) -> None:
    """An optimizer that another worker holds."""
    model = linear()
    optimizer = worker.attach(model, sgd(model))
    with Worker(LocalJob().member(), WorkerConfig()) as other:
        other.attach(model, optimizer)


def plateau(worker: Worker, model: nn.Module, optimizer: Optimizer) -> None:
    worker.schedule(ReduceLROnPlateau(optimizer))


def grow(worker: Worker, model: nn.Module, optimizer: Optimizer) -> None:
    optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(2))]})


class Endless(IterableDataset[int]):
    """Samples without numbers."""

    def __iter__(self) -> Iterator[int]:
        return iter(range(10))


REFUSED: dict[str, Refusal] = {
    "optimizer subclass with its own step": at_attach(
        linear, lambda m: DoubleStep(m.parameters(), lr=0.1), UnsupportedError, "DoubleStep overrides the step of SGD"
    ),
    "optimizer that is not of torch.optim": at_attach(
        linear, lambda m: FromScratch(m.parameters()), UnsupportedError, "FromScratch can't be run on the servers"
    ),
    "LBFGS": at_attach(
        linear,
        lambda m: LBFGS(m.parameters()),
        UnsupportedError,
        "optimizer LBFGS can't be run on the servers: it calls the closure several times per step",
    ),
    "step replaced on the object": at_attach(linear, replaced_step, UnsupportedError, "was replaced on the object"),
    "optimizer state that the class doesn't have": at_attach(
        linear,
        lambda m: with_state(m, trust=1.0),
        UnsupportedError,
        "the optimizer's state of 'weight' holds 'trust', which torch.optim.Adam doesn't have",
    ),
    "optimizer state with entries missing": at_attach(
        linear,
        lambda m: with_state(m, exp_avg_sq=None),
        ModelError,
        "the optimizer's state of 'weight' lacks 'exp_avg_sq'",
    ),
    "optimizer state of another shape": at_attach(
        linear,
        lambda m: with_state(m, exp_avg=torch.zeros(3)),
        ModelError,
        "has 'exp_avg' of shape [3], expected [2, 2]; is it of another model?",
    ),
    "lazy module before its first forward": at_attach(
        lambda: nn.Sequential(nn.LazyLinear(2)), sgd, ModelError, "'0.weight' has no shape yet"
    ),
    "parameters on the meta device": at_attach(
        lambda: nn.Linear(2, 2, device="meta"), sgd, ModelError, "'weight' is on the meta device"
    ),
    "nn.Embedding(max_norm=...)": at_attach(
        lambda: nn.Sequential(nn.Embedding(3, 2, max_norm=1.0)), sgd, UnsupportedError, "Embedding '0' has max_norm=1.0"
    ),
    "sparse gradients under AdamW": at_attach(
        words,
        lambda m: AdamW(m.parameters()),
        UnsupportedError,
        "AdamW does not support sparse gradients, and the embedding of '0.weight' has sparse=True",
    ),
    "sparse gradients under Muon": at_attach(
        words, lambda m: Muon(m.parameters()), UnsupportedError, "Muon does not support sparse gradients"
    ),
    "dense gradients under SparseAdam": at_attach(
        lambda: nn.Sequential(nn.Embedding(3, 2, sparse=True), nn.Linear(2, 2)),
        lambda m: SparseAdam(m.parameters()),
        UnsupportedError,
        "SparseAdam does not support dense gradients, and '1.weight' belongs to no nn.Embedding",
    ),
    "weight decay of sparse gradients, SGD": at_attach(
        words,
        lambda m: SGD(m.parameters(), lr=0.1, weight_decay=0.1),
        UnsupportedError,
        "SGD: weight_decay is not compatible with sparse gradients, and the embedding of '0.weight'",
    ),
    "weight decay of sparse gradients, Adagrad": at_attach(
        words,
        lambda m: Adagrad(m.parameters(), weight_decay=0.1),
        UnsupportedError,
        "Adagrad: weight_decay is not compatible with sparse gradients",
    ),
    "parameters of another model": at_attach(
        linear, foreign, ModelError, "parameter 2 of the optimizer's group 0, shape (7,), is not in the model"
    ),
    "complex parameters under Adafactor": at_attach(
        lambda: nn.Linear(2, 2, dtype=torch.complex64),
        lambda m: Adafactor(m.parameters()),
        UnsupportedError,
        "Adafactor does not support complex parameters, and 'weight' is complex64",
    ),
    "complex parameters under Muon": at_attach(
        lambda: nn.Linear(2, 2, bias=False, dtype=torch.complex128),
        lambda m: Muon(m.parameters()),
        UnsupportedError,
        "Muon does not support complex parameters, and 'weight' is complex128",
    ),
    "int8 parameters": at_attach(
        integers, sgd, UnsupportedError, "'1' is int8; served are float64, float32, float16, bfloat16"
    ),
    "float8 parameters": at_attach(eight_bits, sgd, UnsupportedError, "'1' is float8_e4m3fn; served are"),
    "parameters that overlap in memory": at_attach(Lambs, sgd, UnsupportedError, "'a' and 'b' share memory"),
    "expanded parameters": at_attach(expanded, sgd, UnsupportedError, "'0' is an expanded tensor"),
    "a model without parameters": at_attach(
        nn.ReLU, lambda m: sgd(nn.Linear(1, 1)), ModelError, "ReLU has no parameters"
    ),
    "capturable=True": at_attach(
        linear, lambda m: Adam(m.parameters(), capturable=True), UnsupportedError, "capturable=True"
    ),
    "differentiable=True": at_attach(
        linear,
        lambda m: AdamW(m.parameters(), differentiable=True),
        UnsupportedError,
        "AdamW with differentiable=True can't be served: gradients can't flow through a step",
    ),
    "two optimizers in a job": Refusal(
        two_optimizers,
        UnsupportedError,
        "attach() was called already: one model with "
        "one optimizer per job. Put all parameters into one module and one optimizer",
    ),
    "an attached optimizer": Refusal(twice, UnsupportedError, "this optimizer is attached to a worker already"),
    "accumulate=0": option(ConfigError, "attach(accumulate=0) must be a whole number", accumulate=0),
    "unknown on_nonfinite": option(
        ConfigError, "attach(on_nonfinite='ignore') must be one of: raise, skip, zero", on_nonfinite="ignore"
    ),
    "unknown buffer policy": option(ConfigError, "attach(buffers=...): policy 'mean' must be one of", buffers="mean"),
    "dense gradient of a table": Refusal(
        tied_head, UnsupportedError, "the gradient of 'weight' is dense, and SparseAdam does not support dense"
    ),
    "sparse gradient of a layer": later(
        swap(0),
        UnsupportedError,
        "the gradient of '0.weight' is sparse "
        "(torch.sparse_coo), but no nn.Embedding or nn.EmbeddingBag of the model had",
    ),
    "local edit of weights": later(edit, LocalWeightEdit, "weights of '0.weight' were changed locally before step 1"),
    "load_state_dict of the model": later(load, LocalWeightEdit, "load others for everybody with worker.load"),
    "inf or NaN": later(
        lambda w, m, o: train_step(m, o, float("nan")),
        NonFiniteGradient,
        "the gradient of '0.weight' holds inf or NaN at step 1 of worker",
    ),
    "add_param_group": later(grow, UnsupportedError, "add_param_group() after attach() is not served"),
    "ReduceLROnPlateau by the job's steps": later(
        plateau,
        UnsupportedError,
        "schedule() can't follow the job with ReduceLROnPlateau: it goes by each worker's own metric",
    ),
    "iterable data": Refusal(
        lambda w: w.epochs(Endless(), 2),
        UnsupportedError,
        "Endless is an IterableDataset: it has no sample numbers that could be leased",
    ),
}
"""By what it is."""
