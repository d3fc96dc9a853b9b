"""Allow-list unpickler: what arrives over RPC can name a handful of objects, all sealed, and nothing else.

torch RPC unpickles every Python request and answer. Here a pickle may name only: the call record, the endpoints, the
receiver of tensors, the error record and a few exception classes. What it gets for those names are stand-ins without
a `__dict__` and without settable attributes, so that a pickle can't reach further through them or change them. This
is a seat belt, not a boundary: built-in operators travel by another way that no unpickler sees.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import IO, NoReturn

REFUSAL = "torch-ps refuses"
"""Starts the text of each refusal; the caller's side recognises it."""

EXCEPTIONS: tuple[type[Exception], ...] = (
    Exception, RuntimeError, ValueError, TypeError, AttributeError, KeyError, IndexError, NotImplementedError,
    MemoryError, AssertionError,
)  # fmt: skip
"""What an error record may name; only classes whose attributes can't be set."""


class SealedType(type):
    """Metaclass of classes whose attributes can't be set."""

    def __setattr__(cls, name: str, value: object) -> NoReturn:
        raise AttributeError(f"{REFUSAL} to change {cls.__name__}.{name}")


class Sealed:
    """A callable stand-in: no `__dict__`, nothing settable, and calling it is all that can be done."""

    __slots__ = ("_call",)
    _call: Callable[..., object]

    def __init__(self, call: Callable[..., object]) -> None:
        object.__setattr__(self, "_call", call)

    def __call__(self, *args: object, **kwargs: object) -> object:
        """Call what it stands for."""
        return self._call(*args, **kwargs)

    def __setattr__(self, name: str, value: object) -> NoReturn:
        raise AttributeError(f"{REFUSAL} to set {name}")


class Token:
    """A name without abilities."""

    __slots__ = ()


def guarded_getattr(owner: object, allowed: Mapping[str, object]) -> Sealed:
    """A `getattr` that answers only for the object `owner` and the names in `allowed`."""
    table = MappingProxyType(dict(allowed))

    def look_up(target: object, name: object) -> object:
        if target is owner and type(name) is str and name in table:
            return table[name]
        raise pickle.UnpicklingError(f"{REFUSAL} getattr on {type(target).__name__}")

    return Sealed(look_up)


def allow_list(
    *,
    call_record: tuple[type, type],
    error_record: tuple[type, type],
    receiver: tuple[type, str],
    endpoints: Iterable[Callable[..., object]],
) -> Mapping[tuple[str, str], object]:
    """(module, name) → what a pickle gets for it.

    `call_record` and `error_record` are (class named in pickles, sealed class given out); `receiver` is the class and
    the name of its class method that turns indices into tensors.
    """
    owner, method = receiver
    token = Token()
    allowed: dict[tuple[str, str], object] = {
        (named.__module__, named.__qualname__): given for named, given in (call_record, error_record)
    }
    allowed[owner.__module__, owner.__qualname__] = token
    allowed["builtins", "getattr"] = guarded_getattr(token, {method: Sealed(getattr(owner, method))})
    allowed.update({(kind.__module__, kind.__qualname__): kind for kind in EXCEPTIONS})
    allowed.update({(f.__module__, f.__qualname__): Sealed(f) for f in endpoints})
    return MappingProxyType(allowed)


def unpickler_class(allowed: Mapping[tuple[str, str], object]) -> type[pickle.Unpickler]:
    """An unpickler class that finds what `allowed` holds. Its instances are as thread-safe as pickle's: not."""

    class AllowListUnpickler(pickle.Unpickler):
        """Looks names up in a table and imports nothing."""

        def __init__(self, file: IO[bytes]) -> None:
            super().__init__(file)

        def find_class(self, module: str, name: str) -> object:
            found = allowed.get((module, name))
            if found is None:
                raise pickle.UnpicklingError(f"{REFUSAL} {module[:60]}.{name[:60]} in a message")
            return found

    return AllowListUnpickler
