"""The allow-list unpickler: known ways out of it are closed."""

from __future__ import annotations

import io
import os
import pathlib
import pickle
import pickletools
from collections.abc import Callable

import pytest
import torch
from torch.distributed.rpc import internal

from ps.rpc import endpoints, pickler, torch_private

CANARY = "PS_TEST_CANARY"


@pytest.fixture
def restricted(monkeypatch: pytest.MonkeyPatch) -> type[pickle.Unpickler]:
    """The unpickler as RPC gets it; torch's own is put back afterwards."""
    monkeypatch.setattr(internal, "_unpickler", internal._unpickler)
    torch_private.restrict_unpickling(endpoints.ENDPOINTS)
    return internal._unpickler


class Runs:
    """Pickles to a call of `function`."""

    def __init__(self, function: Callable[..., object], *arguments: object) -> None:
        self.call = function, arguments

    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        return self.call


def load(unpickler: type[pickle.Unpickler], content: bytes) -> object:
    return unpickler(io.BytesIO(content)).load()


def ordinary_message() -> tuple[bytes, list[torch.Tensor]]:
    record = internal.PythonUDF(endpoints.call, ((1, 2, b"x", None, 0.5, "t", True), torch.zeros(3)), {})
    content, tensors = internal.serialize(record)  # type: ignore[no-untyped-call]
    return content, tensors


def test_ordinary_calls_pass(restricted: type[pickle.Unpickler]) -> None:
    """A call of an endpoint with a header and a tensor arrives whole, as what torch runs."""
    content, tensors = ordinary_message()
    record = internal.deserialize(content, tensors)  # type: ignore[no-untyped-call]
    assert isinstance(record, internal.PythonUDF)
    assert record.args[0] == (1, 2, b"x", None, 0.5, "t", True)
    assert torch.equal(record.args[1], torch.zeros(3))
    assert callable(record.func)


def test_error_records_pass(restricted: type[pickle.Unpickler]) -> None:
    """An error of the other side is recognised by torch and raised with its text."""
    content, _ = internal.serialize(internal.RemoteException("On X", ValueError))  # type: ignore[no-untyped-call]
    record = load(restricted, content)
    with pytest.raises(ValueError, match="On X"):
        internal._handle_exception(record)  # type: ignore[no-untyped-call]


@pytest.mark.parametrize(
    "attack",
    [
        Runs(eval, "1+1"),
        Runs(exec, "import os"),
        Runs(os.system, "true"),
        Runs(getattr, endpoints.greet, "__code__"),
        Runs(getattr, endpoints.call, "__globals__"),
        Runs(getattr, internal._InternalRPCPickler, "_script_module_receiver"),
        Runs(getattr, internal._InternalRPCPickler, "__init__"),
        Runs(pickle.loads, pickle.dumps(1)),
        Runs(__import__, "os"),
        Runs(setattr, endpoints.call, "__name__", "x"),
        Runs(internal._InternalRPCPickler._py_rref_receiver, ()),
        Runs(torch.load, "/nowhere"),
        Runs(torch.hub.load, "x"),
        Runs(vars, endpoints.call),
        Runs(endpoints.install, None, 1),
        Runs(endpoints._OneAnswer, None),
        Runs(BaseException, "x"),
        Runs(SystemExit, 3),
        torch.nn.Parameter(torch.zeros(1)),
        torch.nn.Linear(1, 1),
        pathlib.PurePosixPath("x"),
    ],
    ids=lambda attack: repr(getattr(attack, "call", attack))[:60],
)  # fmt: skip
def test_escapes_are_refused(restricted: type[pickle.Unpickler], attack: object) -> None:
    """Functions, dotted names, getattr chains, nested pickles and foreign classes don't get in."""
    for protocol in (0, 2, 4, 5):
        with pytest.raises(pickle.UnpicklingError, match=pickler.REFUSAL):
            load(restricted, pickle.dumps(attack, protocol))


@pytest.mark.parametrize("name", ["call.__globals__", "greet.__code__", "_installed", "torch", "ENDPOINTS", ""])
def test_dotted_and_other_names_are_refused(restricted: type[pickle.Unpickler], name: str) -> None:
    """A name is looked up whole in a table, never walked along."""
    content = b"\x80\x04\x8c\x10ps.rpc.endpoints\x8c" + bytes([len(name)]) + name.encode() + b"\x93."
    pickletools.dis(content, io.StringIO())
    with pytest.raises(pickle.UnpicklingError, match=pickler.REFUSAL):
        load(restricted, content)


def names(unpickler: type[pickle.Unpickler]) -> list[bytes]:
    """The opcode that pushes each thing a pickle may name."""
    public = [
        ("torch.distributed.rpc.internal", "PythonUDF"),
        ("torch.distributed.rpc.internal", "RemoteException"),
        ("torch.distributed.rpc.internal", "_InternalRPCPickler"),
        ("builtins", "getattr"),
        *(("builtins", kind.__name__) for kind in pickler.EXCEPTIONS),
        *(("ps.rpc.endpoints", f.__qualname__) for f in endpoints.ENDPOINTS),
    ]
    return [f"c{module}\n{name}\n".encode() for module, name in public]


def test_nothing_named_can_be_changed(restricted: type[pickle.Unpickler]) -> None:
    """BUILD, with a dictionary or with slots, changes no attribute of anything that a pickle can name."""
    for push in names(restricted):
        before = load(restricted, push + b".")
        for state in (b"}V%s\nI1\ns" % CANARY.encode(), b"(N}V%s\nI1\nst" % CANARY.encode()):
            with pytest.raises((pickle.UnpicklingError, AttributeError, TypeError)):
                load(restricted, push + state + b"b.")
        assert not hasattr(before, CANARY)


def test_receiver_can_be_reached_but_not_changed(restricted: type[pickle.Unpickler]) -> None:
    """What the guarded getattr gives out is sealed as well."""
    receiver = b"cbuiltins\ngetattr\n(ctorch.distributed.rpc.internal\n_InternalRPCPickler\nV_tensor_receiver\ntR"
    assert isinstance(load(restricted, receiver + b"."), pickler.Sealed)
    with pytest.raises((pickle.UnpicklingError, AttributeError)):
        load(restricted, receiver + b"}V%s\nI1\nsb." % CANARY.encode())
    assert not hasattr(internal._InternalRPCPickler._tensor_receiver, CANARY)


def test_tokens_can_do_nothing(restricted: type[pickle.Unpickler]) -> None:
    """The class of the receiver is there by name only."""
    with pytest.raises(TypeError, match="not callable"):
        load(restricted, b"ctorch.distributed.rpc.internal\n_InternalRPCPickler\n(tR.")


def test_persistent_ids_and_extensions_are_refused(restricted: type[pickle.Unpickler]) -> None:
    """The other ways of a pickle to name something lead nowhere."""
    for content in (b"Pname\n.", b"\x82\x01.", b"(iposix\nsystem\n."):
        with pytest.raises((pickle.UnpicklingError, ValueError)):
            load(restricted, content)


def test_refused_message_leaves_torch_usable(restricted: type[pickle.Unpickler]) -> None:
    """After an attack the same thread reads ordinary messages."""
    with pytest.raises(pickle.UnpicklingError):
        internal.deserialize(pickle.dumps(Runs(eval, "1")), [])  # type: ignore[no-untyped-call]
    test_ordinary_calls_pass(restricted)
