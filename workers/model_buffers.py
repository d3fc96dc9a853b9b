"""A model's persistent buffers: which of them workers share and how, where they are now, and which have changed.

The default is what one process over all the data would have: running statistics are averaged over the workers, and
BatchNorm counts the batches of the one that has seen most. Whoever evaluates has the same buffers as all others.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ps.errors import ConfigError, UnsupportedError
from ps.sharding.spec import BUFFER_DTYPE_BYTES, LOCAL, NO_GROUP, ParamSpec
from workers.signature import plain_name, unwrap

log = logging.getLogger(__name__)

POLICIES = ("average", "latest", LOCAL)

Policies = str | Mapping[str, str]
"""One policy for all buffers, or policies by module name ("" = the whole model); the longest name that fits counts."""


@dataclass(frozen=True, slots=True)
class ModelBuffer:
    """A buffer, by the place where it is registered: the tensor there may be replaced at any time."""

    spec: ParamSpec
    module: nn.Module
    attribute: str

    first: Tensor
    """What it was at attach."""

    @property
    def tensor(self) -> Tensor:
        """The buffer as it is now; `first` for a local one that is of another form now.

        Raises `UnsupportedError` for a shared one that is.
        """
        tensor = self.module._buffers.get(self.attribute)
        if tensor is not None and tensor.shape == self.spec.shape and tensor.dtype is self.first.dtype:
            return tensor
        if self.spec.buffer == LOCAL:
            return self.first
        now = "None" if tensor is None else f"{_dtype(tensor)} {list(tensor.shape)}"
        raise UnsupportedError(
            f"buffer {self.spec.name!r} was {self.spec.dtype} {list(self.spec.shape)} at attach() and is {now} now: "
            "servers keep buffers of fixed shape and dtype. Register it with persistent=False, or say "
            f"attach(..., buffers={{{self.spec.name.rpartition('.')[0]!r}: 'local'}})"
        )


def describe_buffers(model: nn.Module, policies: Policies | None) -> list[ModelBuffer]:
    """The persistent buffers of a model, tied ones once. Raises `ConfigError` for a bad policy or module name.

    Floating-point ones have the policy of their module, `average` unless given. Integer ones of BatchNorm and the like
    take the maximum, unless their module's policy is `local`; all other integers are `local`.
    """
    plain = unwrap(model)
    by_module = _by_module(plain, policies)
    found: list[ModelBuffer] = []
    for name, module, attribute, tensor in _persistent(plain):
        if reason := _unfit(tensor):
            log.warning("buffer %r stays out of the servers, and of exported models: %s", name, reason)
            continue
        spec = ParamSpec(
            name=name,
            shape=tuple(tensor.shape),
            dtype=_dtype(tensor),
            group=NO_GROUP,
            buffer=_policy_of(module, tensor, _longest(by_module, name)),
        )
        found.append(ModelBuffer(spec, module, attribute, tensor))
    return found


def _persistent(model: nn.Module) -> Iterator[tuple[str, nn.Module, str, Tensor]]:
    seen: set[int] = set()
    for prefix, module in model.named_modules():
        for attribute, tensor in module._buffers.items():
            if tensor is None or attribute in module._non_persistent_buffers_set or id(tensor) in seen:
                continue
            seen.add(id(tensor))
            yield plain_name(f"{prefix}.{attribute}" if prefix else attribute), module, attribute, tensor


def _by_module(model: nn.Module, policies: Policies | None) -> dict[str, str]:
    given = {"": "average"} if policies is None else {"": policies} if isinstance(policies, str) else dict(policies)
    names = {plain_name(name) for name, _ in model.named_modules()}
    for name, policy in given.items():
        if policy not in POLICIES:
            raise ConfigError(f"attach(buffers=...): policy {policy!r} must be one of: {', '.join(POLICIES)}")
        if name not in names:
            raise ConfigError(
                f"attach(buffers=...): the model has no module {name!r}; names are those of named_modules()"
            )
    return {"": "average", **given}


def _longest(by_module: Mapping[str, str], buffer: str) -> str:
    fitting = [name for name in by_module if not name or buffer.startswith(name + ".")]
    return by_module[max(fitting, key=len)]


def _policy_of(module: nn.Module, tensor: Tensor, policy: str) -> str:
    if tensor.is_floating_point() or tensor.is_complex():
        return policy
    return "max" if _is_norm(module) and policy != LOCAL else LOCAL


def _unfit(tensor: Tensor) -> str:
    if _dtype(tensor) not in BUFFER_DTYPE_BYTES:
        return f"its dtype is {_dtype(tensor)}"
    if tensor.layout is not torch.strided or type(tensor) is not Tensor or tensor.is_inference():
        return f"it is no plain dense tensor ({type(tensor).__name__}, {tensor.layout})"
    if tensor.device.type == "meta":
        return "it is on the meta device"
    if any(stride == 0 and size > 1 for size, stride in zip(tensor.shape, tensor.stride(), strict=True)):
        return "it is an expanded tensor (its elements share memory)"
    return ""


def _is_norm(module: nn.Module) -> bool:
    return isinstance(module, nn.modules.batchnorm._NormBase)


def _dtype(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _witnesses(buffer: ModelBuffer) -> tuple[str, ...]:
    """Buffers of the same module whose version counters tell when this one is written; none if they don't.

    Kernels of normalisations write running statistics without telling anybody, but BatchNorm counts its batches.
    """
    module, counter = buffer.module, "num_batches_tracked"
    if not _is_norm(module) or buffer.attribute == counter:
        return (buffer.attribute,)
    if isinstance(module, nn.modules.batchnorm._BatchNorm) and module._buffers.get(counter) is not None:
        return buffer.attribute, counter
    return ()


class _Watched:
    """A shared buffer, and what it was when it was looked at last."""

    def __init__(self, buffer: ModelBuffer) -> None:
        self.buffer = buffer
        self._witnesses = _witnesses(buffer)
        self._seen: list[int] | Tensor | None = None

    def remember(self) -> None:
        """Note what it is now."""
        self._seen = self._marks() if self._witnesses else self.buffer.tensor.clone()

    @property
    def changed(self) -> bool:
        """Whether it is something else now."""
        if isinstance(self._seen, Tensor):
            return not torch.equal(self._seen, self.buffer.tensor)
        return self._seen is None or self._seen != self._marks()

    def _marks(self) -> list[int]:
        registered = self.buffer.module._buffers
        marks: list[int] = []
        for name in self._witnesses:
            tensor = registered[name]
            marks += (id(tensor), tensor._version if tensor is not None else 0)
        return marks


class ModelBuffers:
    """The buffers of an attached model, in the signature's order. Belongs to the thread that owns the model."""

    def __init__(self, buffers: Sequence[ModelBuffer]) -> None:
        self._buffers = buffers
        self._watched = {index: _Watched(buffer) for index, buffer in enumerate(buffers) if buffer.spec.buffer != LOCAL}
        self._warned: set[str] = set()

    def tensors(self) -> list[Tensor]:
        """All of them as they are now."""
        return [buffer.tensor for buffer in self._buffers]

    def changed(self) -> list[bool]:
        """Whether each has changed since `remember`; local ones never have. Writes through `.data` can't be seen."""
        changed = [False] * len(self._buffers)
        for index, watched in self._watched.items():
            changed[index] = watched.changed
        return changed

    def remember(self) -> None:
        """Note what they are now."""
        for watched in self._watched.values():
            watched.remember()

    def warn(self, name: str) -> None:
        """Say, once, that a buffer holds inf or NaN."""
        if name not in self._warned:
            self._warned.add(name)
            log.warning("buffer %r holds inf or NaN and is not sent; the servers' values replace it", name)
