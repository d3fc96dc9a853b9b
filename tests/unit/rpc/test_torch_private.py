"""Each private name of torch that we use is there and has the shape we know; a new torch release fails here first."""

from __future__ import annotations

import ctypes
import inspect

import pytest
import torch
import torch.distributed as dist
import torch.distributed.rpc as rpc
from torch.distributed.rpc import functions, internal

from ps.errors import ConfigError
from ps.rpc import torch_private


def test_torch_is_a_checked_version() -> None:
    """Private names were read on these releases."""
    assert torch.__version__.startswith(torch_private.CHECKED_VERSIONS)


def test_names_that_start_an_agent() -> None:
    """Constructor, options, store and the three functions around them."""
    constructor = rpc.TensorPipeAgent.__init__.__doc__ or ""  # type: ignore[attr-defined]
    assert constructor.index("store:") < constructor.index("name:") < constructor.index("reverse_device_maps:")
    assert "_update_group_membership" in dir(rpc.TensorPipeAgent)  # type: ignore[attr-defined]
    options = inspect.signature(rpc.TensorPipeRpcBackendOptions).parameters
    assert {"num_worker_threads", "_transports", "_channels"} <= set(options)
    assert callable(dist.autograd._init)  # type: ignore[attr-defined]
    assert list(inspect.signature(rpc.api._init_rpc_states).parameters) == ["agent"]
    assert not torch_private.agent_running() or rpc.api._is_current_rpc_agent_set()  # type: ignore[attr-defined]


def test_store_is_private_and_takes_keys() -> None:
    """A HashStore gives back what was set and forgets what was deleted."""
    store = dist.HashStore()  # type: ignore[attr-defined]
    store.set("addrs/x", "uv://127.0.0.1:1")
    assert store.get("addrs/x") == b"uv://127.0.0.1:1"
    assert store.delete_key("addrs/x")


def test_worker_info_takes_aliases() -> None:
    """Ids are int16."""
    assert rpc.WorkerInfo("a:1", 32767).id == 32767  # type: ignore[attr-defined]
    with pytest.raises(TypeError):
        rpc.WorkerInfo("a:1", 32768)  # type: ignore[attr-defined]


def test_unpickler_is_looked_up_at_each_message() -> None:
    """`deserialize` reads the module global, so that replacing it takes effect."""
    assert "_unpickler(" in inspect.getsource(internal._InternalRPCPickler.deserialize)
    assert internal.PythonUDF._fields == ("func", "args", "kwargs")
    assert internal.RemoteException._fields == ("msg", "exception_type")
    assert "isinstance(result, RemoteException)" in inspect.getsource(internal._handle_exception)


def test_messages_name_what_the_allow_list_holds() -> None:
    """A tensor travels as `getattr(_InternalRPCPickler, "_tensor_receiver")(index)`."""
    content, tensors = internal.serialize(internal.PythonUDF(len, (torch.zeros(1),), {}))  # type: ignore[no-untyped-call]
    for name in (b"getattr", b"_InternalRPCPickler", b"_tensor_receiver", b"PythonUDF"):
        assert name in content
    assert len(tensors) == 1


def test_async_execution_keeps_the_name() -> None:
    """The decorated endpoint is pickled under the name that the allow-list holds."""

    @functions.async_execution  # type: ignore[untyped-decorator]
    def endpoint() -> None: ...

    assert endpoint.__qualname__.endswith("endpoint")
    assert endpoint.__module__ == __name__


def test_references_have_a_future() -> None:
    """Waiting for an RRef needs its private future."""
    assert "_get_future" in dir(rpc.PyRRef)  # type: ignore[attr-defined]


def test_log_level_is_where_we_look() -> None:
    """The int behind TORCH_CPP_LOG_LEVEL can be found; it is a small number."""
    level = torch_private.log_level()
    assert isinstance(level, ctypes.c_int)
    assert 0 <= level.value <= 3


def test_quiet_logs_leaves_the_users_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    """With TORCH_CPP_LOG_LEVEL set nothing is changed; without it warnings are hidden."""
    level = torch_private.log_level()
    before = level.value
    try:
        level.value = 1
        monkeypatch.setenv("TORCH_CPP_LOG_LEVEL", "INFO")
        torch_private.quiet_logs()
        assert level.value == 1
        monkeypatch.delenv("TORCH_CPP_LOG_LEVEL")
        torch_private.quiet_logs()
        assert level.value == 2
    finally:
        level.value = before


def test_torch_without_rpc_is_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    """The Windows wheels have no RPC."""
    monkeypatch.setattr(rpc, "is_available", lambda: False)
    with pytest.raises(ConfigError, match=r"no torch\.distributed\.rpc"):
        torch_private.require()
