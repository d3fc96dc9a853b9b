"""The fence around private names of torch.distributed.rpc: none of them is used anywhere else.

Checked on torch 2.13.0; 2.14.1 has the same Python files and headers. `tests/unit/rpc/test_torch_private.py` fails
when one of them goes or changes its shape.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import NewType, cast

import torch
import torch.distributed as dist
import torch.distributed.rpc as rpc
from torch.futures import Future

from ps.errors import ConfigError
from ps.rpc import pickler

log = logging.getLogger(__name__)

CHECKED_VERSIONS = ("2.13", "2.14")
"""torch versions on which the names below were read or run."""

Peer = NewType("Peer", object)
"""A `WorkerInfo`: (name, id) of a process or of a local alias."""

_INTERFACE_VARIABLE = "TP_SOCKET_IFNAME"
_LOG_VARIABLE = "TORCH_CPP_LOG_LEVEL"
_LOG_ERROR = 2
_TIMEOUT = "RPCErr:1:"
_REMOTE_EXCEPTION = "On WorkerInfo("


def require() -> None:
    """Raise `ConfigError` where this torch has no RPC (the Windows wheels, for example)."""
    if not rpc.is_available():
        raise ConfigError(
            f"this build of torch ({torch.__version__}) has no torch.distributed.rpc; use a Linux or macOS wheel"
        )


def quiet_logs() -> None:
    """Show only errors of torch's C++ log, unless the user chose a level by TORCH_CPP_LOG_LEVEL.

    TensorPipe warns on stderr about each peer that leaves. The level is read from the environment when torch is
    imported, which is too late here, so the variable behind it is set. Where it can't be found, warnings stay.
    """
    if _LOG_VARIABLE in os.environ:
        return
    with contextlib.suppress(OSError, ValueError):
        level = log_level()
        level.value = max(level.value, _LOG_ERROR)


def log_level() -> ctypes.c_int:
    """The int behind TORCH_CPP_LOG_LEVEL (0 info, 1 warning, 2 error, 3 fatal)."""
    folder = Path(torch.__file__).parent / "lib"
    found = [folder / name for name in ("libc10.so", "libc10.dylib") if (folder / name).exists()]
    if not found:
        raise OSError(f"no libc10 in {folder}")
    return ctypes.c_int.in_dll(ctypes.CDLL(str(found[0])), "FLAGS_caffe2_log_level")


def restrict_unpickling(endpoints: Iterable[Callable[..., object]]) -> None:
    """From now on RPC messages of this process, requests and answers, go through the allow-list unpickler."""
    from torch.distributed.rpc import internal

    class CallRecord(internal.PythonUDF, metaclass=pickler.SealedType):
        """What a request unpickles to; torch reads its fields."""

        __slots__ = ()

    class ErrorRecord(internal.RemoteException, metaclass=pickler.SealedType):
        """What an error answer unpickles to; torch tests for its base class."""

        __slots__ = ()

    allowed = pickler.allow_list(
        call_record=(internal.PythonUDF, CallRecord),
        error_record=(internal.RemoteException, ErrorRecord),
        receiver=(internal._InternalRPCPickler, "_tensor_receiver"),
        endpoints=endpoints,
    )
    internal._unpickler = pickler.unpickler_class(allowed)


class Agent:
    """The process's one RPC agent, on a private store. `add` and `remove` must not run beside any other call."""

    def __init__(
        self,
        *,
        name: str,
        id: int,
        interface: str,
        transports: tuple[str, ...],
        channels: tuple[str, ...],
        threads: int,
    ) -> None:
        dist.autograd._init(id)  # type: ignore[attr-defined]  # without it the first RPC fails
        self._store = dist.HashStore()  # type: ignore[attr-defined]
        options = rpc.TensorPipeRpcBackendOptions(
            num_worker_threads=threads, _transports=list(transports), _channels=list(channels)
        )
        with _interface(interface):
            self._agent = rpc.TensorPipeAgent(  # type: ignore[attr-defined]
                self._store, name, id, None, options, {}, []
            )
            rpc.api._init_rpc_states(self._agent)  # type: ignore[no-untyped-call]
        self.url: str = self._store.get(f"addrs/{name}").decode()
        """Where this process can be dialled; chosen by TensorPipe."""

    def add(self, name: str, id: int, url: str) -> Peer:
        """Make a process callable under a local name and id, both never used before in this process."""
        peer = rpc.WorkerInfo(name, id)  # type: ignore[attr-defined]
        self._store.set(f"addrs/{name}", url)  # first: without it half a peer is left behind
        self._agent._update_group_membership(peer, [], {}, True)
        return cast(Peer, peer)

    def remove(self, peer: Peer) -> None:
        """Take an alias out of the tables. Calls in flight go on; references made under it become unusable."""
        self._agent._update_group_membership(peer, [], {}, False)  # type: ignore[arg-type]
        self._store.delete_key(f"addrs/{peer.name}")  # type: ignore[attr-defined]

    def call(
        self, peer: Peer, function: Callable[..., object], args: tuple[object, ...], timeout_s: float
    ) -> Future[object]:
        """Run an endpoint at `peer`. Does not block on the network; may raise what sending raises."""
        future = rpc.rpc_async(peer, function, args=args, timeout=timeout_s)
        return cast("Future[object]", future)

    def reference(self, peer: Peer, function: Callable[..., object], timeout_s: float) -> tuple[object, Future[object]]:
        """Make an RRef at `peer` to what `function()` returns there; the future ends when `peer` has made it."""
        rref = rpc.remote(peer, function, timeout=timeout_s)
        return rref, rref._get_future()

    def shutdown(self) -> None:
        """End the agent at once. Waits for running handlers without a bound: call it under a watchdog."""
        rpc.shutdown(graceful=False)


def agent_running() -> bool:
    """Whether this process has an RPC agent, ours or somebody else's."""
    return bool(rpc.api._is_current_rpc_agent_set())  # type: ignore[attr-defined]


def is_timeout(text: str) -> bool:
    """Whether an error text says that no answer came in time."""
    return _TIMEOUT in text


def is_remote_exception(text: str) -> bool:
    """Whether an error text reports a Python exception on the other side."""
    return text.startswith(_REMOTE_EXCEPTION)


def debug_info() -> dict[str, str]:
    """Counters of the RRef context, e.g. `num_owner_rrefs`."""
    return dict(rpc._rref_context_get_debug_info())  # type: ignore[attr-defined]


@contextlib.contextmanager
def _interface(name: str) -> Iterator[None]:
    """Name the interface to whose first address TensorPipe binds; it reads the variable once, with the first agent."""
    before = os.environ.get(_INTERFACE_VARIABLE)
    os.environ[_INTERFACE_VARIABLE] = name
    try:
        yield
    finally:
        if before is None:
            del os.environ[_INTERFACE_VARIABLE]
        else:
            os.environ[_INTERFACE_VARIABLE] = before
