"""The plan of a model without a cluster: what `psctl plan` shows. Imports torch."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass

import torch

from ps.errors import ConfigError
from ps.optim.spec import check_param, served
from ps.sharding.assign import bytes_per_server, place
from ps.sharding.partition import make_plan
from ps.sharding.spec import ModelSignature, ParamSpec, ShardingPlan
from ps.types import Incarnation


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """A plan laid on servers that are numbered from 0."""

    plan: ShardingPlan
    placement: tuple[int, ...]
    """Server of each shard; index = shard id."""
    server_bytes: tuple[int, ...]

    @property
    def imbalance(self) -> float:
        """Bytes of the fullest server over the mean; 1 is perfect."""
        total = sum(self.server_bytes)
        return max(self.server_bytes) * len(self.server_bytes) / total if total else 1.0


def signature(model: str, optimizer: str) -> ModelSignature:
    """Signature of what the factory `pkg.mod:name` returns, all parameters in one group.

    Raises `ConfigError` when there is no such factory or it returns no module, `UnsupportedError` for an optimizer
    that can't be served. What the factory itself raises passes through.
    """
    choice = served(optimizer)
    module = _build(_factory(model))
    if not isinstance(module, torch.nn.Module):
        raise ConfigError(f"--model {model} returned {type(module).__name__}, not a torch.nn.Module")
    tables = [m for m in module.modules() if isinstance(m, torch.nn.Embedding | torch.nn.EmbeddingBag) and m.sparse]
    rows = {id(table.weight) for table in tables}
    params = tuple(
        ParamSpec(name=name, shape=tuple(param.shape), dtype=_dtype(param), group=0, sparse=id(param) in rows)
        for name, param in module.named_parameters()
    )
    for spec in params:
        check_param(choice, spec.name, dtype=spec.dtype, sparse=spec.sparse)
    return ModelSignature(params=params, optimizer=choice.name, whole_tensors=choice.whole_tensors)


def _dtype(param: torch.nn.Parameter) -> str:
    return str(param.dtype).removeprefix("torch.")


def layout(model: ModelSignature, servers: int, shard_bytes: int) -> Layout:
    """Cut the model into shards and lay them on `servers` servers, as the coordinator would."""
    plan = make_plan(model, shard_bytes)
    numbers = [Incarnation(number + 1) for number in range(servers)]
    placement = place(plan, numbers)
    held = bytes_per_server(plan, placement)
    return Layout(
        plan=plan,
        placement=tuple(server - 1 for server in placement),
        server_bytes=tuple(held.get(number, 0) for number in numbers),
    )


def _factory(text: str) -> Callable[[], object]:
    module_name, _, name = text.partition(":")
    if not module_name or not name:
        raise ConfigError(f"--model {text!r} is not PACKAGE.MODULE:FACTORY, e.g. torchvision.models:resnet50")
    try:
        found: object = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not module_name.startswith(error.name):
            raise  # a module that the user's own module imports
        raise ConfigError(f"--model {text}: there is no module {module_name!r}") from None
    for part in name.split("."):
        if not hasattr(found, part):
            raise ConfigError(f"--model {text}: {module_name} has no {name!r}")
        found = getattr(found, part)
    if not callable(found):
        raise ConfigError(f"--model {text}: {name} can't be called")
    return found


def _build(factory: Callable[[], object]) -> object:
    """The model on the meta device, where it takes no memory; for real where its code doesn't work there."""
    try:
        with torch.device("meta"):
            return factory()
    except (NotImplementedError, RuntimeError):
        return factory()
