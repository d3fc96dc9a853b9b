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
        if tensor is not None and tuple(tensor.shape) == self.spec.shape and _dtype(tensor) == self.spec.dtype:
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


@dataclass(frozen=True, slots=True)
class _Seen:
    """What a buffer was at some time."""

    marks: tuple[int, ...]
    """Change when the buffer is replaced, or written by what tells its version counter."""
    copy: Tensor | None
    """Its values, where that is not enough."""

    @classmethod
    def of(cls, buffer: ModelBuffer) -> _Seen:
        # Kernels of normalisations write running statistics without telling anybody; BatchNorm counts its batches.
        tensor, counter = buffer.tensor, buffer.module._buffers.get("num_batches_tracked")
        silent = _is_norm(buffer.module) and tensor is not counter
        counted = silent and counter is not None and isinstance(buffer.module, nn.modules.batchnorm._BatchNorm)
        marks = (id(tensor), tensor._version)
        if counted and counter is not None:
            return cls((*marks, id(counter), counter._version), None)
        return cls(marks, tensor.clone() if silent else None)

    def differs(self, buffer: ModelBuffer) -> bool:
        """Whether the buffer has changed since."""
        now = _Seen.of(buffer)
        if self.marks != now.marks:
            return True
        return self.copy is not None and now.copy is not None and not torch.equal(self.copy, now.copy)


class ModelBuffers:
    """The buffers of an attached model, in the signature's order. Belongs to the thread that owns the model."""

    def __init__(self, buffers: Sequence[ModelBuffer]) -> None:
        self._buffers = buffers
        self._seen: list[_Seen | None] = [None] * len(buffers)
        self._warned: set[str] = set()

    def tensors(self) -> list[Tensor]:
        """All of them as they are now."""
        return [buffer.tensor for buffer in self._buffers]

    def changed(self) -> list[bool]:
        """Whether each has changed since `remember`; local ones never have. Writes through `.data` can't be seen."""
        return [
            buffer.spec.buffer != LOCAL and (seen is None or seen.differs(buffer))
            for buffer, seen in zip(self._buffers, self._seen, strict=True)
        ]

    def remember(self) -> None:
        """Note what they are now."""
        self._seen = [None if buffer.spec.buffer == LOCAL else _Seen.of(buffer) for buffer in self._buffers]

    def warn(self, name: str) -> None:
        """Say, once, that a buffer holds inf or NaN."""
        if name not in self._warned:
            self._warned.add(name)
            log.warning("buffer %r holds inf or NaN and is not sent; the servers' values replace it", name)
