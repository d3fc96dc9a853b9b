"""Errors of the control plane on the wire: exception ⇄ gRPC status, mapped here and nowhere else.

The class travels by name in the trailing metadata, the message as the status text. A status without that name is not
ours: the network's, gRPC's or a bug's.
"""

from __future__ import annotations

import grpc

from ps import errors
from ps.control.membership import NameTaken
from ps.errors import PsError

ERROR_KEY = "ps-error"
"""Trailing metadata that names the exception class."""

INCARNATION_KEY = "ps-incarnation"
SECRET_KEY = "ps-secret-bin"

MAX_TEXT = 2000
"""Characters of a message that travel; gRPC bounds the headers it shares with them."""

_CODES: tuple[tuple[type[PsError], grpc.StatusCode], ...] = (
    (errors.Fenced, grpc.StatusCode.PERMISSION_DENIED),
    (errors.WireError, grpc.StatusCode.INVALID_ARGUMENT),
    (NameTaken, grpc.StatusCode.ALREADY_EXISTS),
    (errors.ModelMismatch, grpc.StatusCode.FAILED_PRECONDITION),
    (errors.UnsupportedError, grpc.StatusCode.FAILED_PRECONDITION),
    (errors.ModelError, grpc.StatusCode.FAILED_PRECONDITION),
    (errors.ConfigError, grpc.StatusCode.FAILED_PRECONDITION),
    (errors.JobFailed, grpc.StatusCode.FAILED_PRECONDITION),
    (errors.Refused, grpc.StatusCode.FAILED_PRECONDITION),
)

RETRYABLE = (
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.DEADLINE_EXCEEDED,
    grpc.StatusCode.CANCELLED,
    grpc.StatusCode.ABORTED,
)
"""Ask again: the coordinator was not reached, was too slow, is restarting, or says "not yet"."""


def status_of(error: PsError) -> tuple[grpc.StatusCode, str, tuple[tuple[str, str], ...]]:
    """(code, text, trailing metadata) for an error that a call has ended in."""
    for kind, code in _CODES:
        if isinstance(error, kind):
            return code, str(error)[:MAX_TEXT], ((ERROR_KEY, kind.__name__),)
    return grpc.StatusCode.INTERNAL, f"{type(error).__name__}: {error}"[:MAX_TEXT], ()


def error_of(failure: grpc.RpcError) -> PsError:
    """The exception for a status that is not to be retried."""
    text = failure.details() or failure.code().name
    trailing = {item.key: item.value for item in failure.trailing_metadata() or ()}
    name = trailing.get(ERROR_KEY, "")
    for kind, _ in _CODES:
        if kind.__name__ == name:
            # NameTaken is the coordinator's own business; for the caller it is a plain refusal.
            return errors.Refused(text) if kind is NameTaken else kind(text)
    if failure.code() is grpc.StatusCode.UNIMPLEMENTED:
        return errors.Refused(f"what listens there is no torch-ps coordinator, or one of another version: {text}")
    return errors.Refused(f"{failure.code().name}: {text}")
