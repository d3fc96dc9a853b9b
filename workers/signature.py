"""Reads a model and an optimizer: what they are for the servers, or why they can't be served, by name."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from ps.errors import ModelError, UnsupportedError
from ps.optim.spec import SERVED, ServedOptimizer, check_param, check_rows, hyper, served
from ps.sharding.spec import DTYPE_BYTES, NO_GROUP, ModelSignature, ParamSpec
from ps.types import Hyper
from workers import state
from workers.state import ParamState


@dataclass(frozen=True, slots=True, kw_only=True)
class Description:
    """What `describe` found out."""

    signature: ModelSignature
    params: tuple[nn.Parameter, ...]
    """In the signature's order; its buffers come after them, and are not here."""
    served: ServedOptimizer
    base: type[Optimizer]
    """The torch.optim class that the servers run."""
    state: Mapping[int, ParamState]
    """State that the optimizer has already, by index of the parameter; empty if it is newly built."""

    @property
    def trained(self) -> list[nn.Parameter | None]:
        """`params`, with None for those in no param group."""
        specs = self.signature.params[: len(self.params)]
        return [None if spec.group == NO_GROUP else param for param, spec in zip(self.params, specs, strict=True)]


def describe(model: nn.Module, optimizer: Optimizer, buffers: Sequence[ParamSpec] = ()) -> Description:
    """The signature of a model with these buffers, and its optimizer.

    Reads only; raises `ModelError` or `UnsupportedError` by name.
    """
    base, found = served_class(optimizer)
    check_modules(model)
    named = list(named_params(model))
    if not named:
        raise ModelError(f"{type(model).__name__} has no parameters to train")
    groups = {id(param): index for index, group in enumerate(optimizer.param_groups) for param in group["params"]}
    check_same_params(named, optimizer)
    check_memory(named)
    rows = sparse_params(model)
    specs = tuple(
        _spec(name, param, groups.get(id(param), NO_GROUP), found.sparse and id(param) in rows) for name, param in named
    )
    check_kinds(specs, [param for _, param in named], rows, found, hyper_groups(optimizer, found))
    signature = ModelSignature(params=(*specs, *buffers), optimizer=found.name, whole_tensors=found.whole_tensors)
    return Description(
        signature=signature,
        params=tuple(param for _, param in named),
        served=found,
        base=base,
        state=carried_state(optimizer, named, specs, found),
    )


def hyper_groups(optimizer: Optimizer, found: ServedOptimizer) -> tuple[Hyper, ...]:
    """The current hyper-parameters of every param group, as a push carries them."""
    return tuple(hyper(group, found) for group in optimizer.param_groups)


def unwrap(model: nn.Module) -> nn.Module:
    """The user's own module under torch.compile, DistributedDataParallel and DataParallel."""
    while True:
        inner = getattr(model, "_orig_mod", None)  # torch.compile's OptimizedModule
        if isinstance(model, DistributedDataParallel | DataParallel):
            inner = model.module
        if not isinstance(inner, nn.Module):
            return model
        model = inner


def named_params(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Parameters in order, tied ones once, named as in the plain model: the same under every wrapper."""
    for name, param in unwrap(model).named_parameters(remove_duplicate=True):
        yield plain_name(name), param


def plain_name(name: str) -> str:
    """The name of a parameter, buffer or module without what torch.compile adds to it."""
    return ".".join(part for part in name.split(".") if part != "_orig_mod")


def served_class(optimizer: Optimizer) -> tuple[type[Optimizer], ServedOptimizer]:
    """The torch.optim class under the user's, and its entry in the allow-list."""
    if not isinstance(optimizer, Optimizer):
        raise TypeError(f"attach() takes a torch.optim optimizer, got {type(optimizer).__name__}")
    kind = type(optimizer)
    lineage = list(kind.__mro__)
    base = next(cls for cls in lineage if cls.__module__.split(".")[:2] == ["torch", "optim"])
    if base is Optimizer:
        raise UnsupportedError(
            f"optimizer {kind.__module__}.{kind.__name__} can't be run on the servers: they run element-wise classes "
            f"of torch.optim only. Served are: {', '.join(SERVED)}"
        )
    assert issubclass(base, Optimizer)
    found = served(base.__name__)
    _check_step(optimizer, kind, base)
    return base, found


def _check_step(optimizer: Optimizer, kind: type[Optimizer], base: type[Optimizer]) -> None:
    """Servers run the base class: a step changed by the user would silently not be used."""
    original = inspect.unwrap(base.step)
    own = next((cls for cls in kind.__mro__ if "_init_group" in vars(cls)), base)
    if inspect.unwrap(kind.step) is not original or not issubclass(base, own):
        raise UnsupportedError(
            f"{kind.__name__} overrides the step of {base.__name__}; servers run torch.optim.{base.__name__} and would "
            "ignore that. Put the change into the gradients (a hook, or before step()), or use the plain class"
        )
    patched = vars(optimizer).get("step")
    if patched is not None and inspect.unwrap(patched) is not original:
        raise UnsupportedError(
            f"step() of this {kind.__name__} was replaced on the object; attach() can't tell what it does. "
            "Attach first, then wrap step()"
        )


def check_modules(model: nn.Module) -> None:
    """Refuse modules that write weights in forward."""
    for name, module in unwrap(model).named_modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.max_norm is not None:
            raise UnsupportedError(
                f"{type(module).__name__} {name!r} has max_norm={module.max_norm}: it changes weights in forward, "
                "and the servers would overwrite that. Leave max_norm out (normalise in your own forward instead)"
            )


def sparse_params(model: nn.Module) -> frozenset[int]:
    """Ids of the parameters whose gradients come as rows: weights of embeddings with sparse=True."""
    embeddings = (module for module in model.modules() if isinstance(module, nn.Embedding | nn.EmbeddingBag))
    return frozenset(id(embedding.weight) for embedding in embeddings if embedding.sparse)


def check_kinds(
    specs: Sequence[ParamSpec],
    params: Sequence[nn.Parameter],
    rows: frozenset[int],
    found: ServedOptimizer,
    groups: Sequence[Hyper],
) -> None:
    """Refuse parameters that the class can't train, as it does itself, but before the first step.

    `rows` are the ids of those whose gradients come as rows.
    """
    for spec, param in zip(specs, params, strict=True):
        if spec.group != NO_GROUP and param.requires_grad:
            check_param(found, spec.name, dtype=spec.dtype, sparse=id(param) in rows)
        if spec.sparse:
            check_rows(found, spec.name, groups[spec.group])


def check_same_params(named: list[tuple[str, nn.Parameter]], optimizer: Optimizer) -> None:
    """Every parameter of the optimizer must be one of the model's."""
    known = {id(param) for _, param in named}
    for index, group in enumerate(optimizer.param_groups):
        names = group.get("param_names") or [""] * len(group["params"])
        for position, (param, name) in enumerate(zip(group["params"], names, strict=True)):
            if id(param) not in known:
                raise ModelError(
                    f"parameter {name or position} of the optimizer's group {index}, shape {tuple(param.shape)}, is "
                    "not in the model given to attach(); attach the module that owns all parameters of the optimizer"
                )


def check_memory(named: list[tuple[str, nn.Parameter]]) -> None:
    """Refuse parameters that share memory without being the same object."""
    stretches = []
    for name, param in named:
        _check_param(name, param)
        if param.numel():
            begin = param.data_ptr()
            span = sum((size - 1) * stride for size, stride in zip(param.shape, param.stride(), strict=True)) + 1
            stretches.append((str(param.device), begin, begin + span * param.element_size(), name))
    stretches.sort()
    for (device, _, end, name), (other_device, begin, _, other) in pairwise(stretches):
        if device == other_device and begin < end:
            raise UnsupportedError(
                f"parameters {name!r} and {other!r} share memory without being the same Parameter; tie weights by "
                "assigning the same Parameter object to both modules"
            )


def _check_param(name: str, param: nn.Parameter) -> None:
    if is_lazy(param):
        raise ModelError(f"parameter {name!r} has no shape yet (lazy module): run one forward pass before attach()")
    if param.device.type == "meta":
        raise ModelError(f"parameter {name!r} is on the meta device and has no values: initialise it before attach()")
    if _name(param.dtype) not in DTYPE_BYTES:
        raise UnsupportedError(
            f"parameter {name!r} is {_name(param.dtype)}; served are {', '.join(DTYPE_BYTES)}. Register what is not "
            "trained as a buffer"
        )
    if param.layout is not torch.strided or type(param.data) is not torch.Tensor or param.is_inference():
        raise UnsupportedError(
            f"parameter {name!r} is no plain dense tensor ({type(param.data).__name__}, {param.layout}); servers hold "
            "dense tensors only"
        )
    if any(stride == 0 and size > 1 for size, stride in zip(param.shape, param.stride(), strict=True)):
        raise UnsupportedError(
            f"parameter {name!r} is an expanded tensor (its elements share memory); clone() it first"
        )


def carried_state(
    optimizer: Optimizer, named: Sequence[tuple[str, nn.Parameter]], specs: Sequence[ParamSpec], found: ServedOptimizer
) -> Mapping[int, ParamState]:
    """What an optimizer that has made steps, or loaded a state_dict, knows of each parameter, by its index."""
    states = {index: dict(kept) for index, (_, param) in enumerate(named) if (kept := optimizer.state.get(param))}
    # Adagrad makes its state when it is built; before the first step it says no more than the defaults do.
    if all(float(kept.get("step", 1)) == 0 for kept in states.values()):
        return {}
    for index, kept in states.items():
        state.check(specs[index], kept, found)
    return states


def _spec(name: str, param: nn.Parameter, group: int, sparse: bool) -> ParamSpec:
    return ParamSpec(
        name=name, shape=tuple(param.shape), dtype=_name(param.dtype), group=group, sparse=sparse and group != NO_GROUP
    )


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
