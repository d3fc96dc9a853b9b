"""Errors on the wire: each exception keeps its class and its text; foreign statuses become refusals."""

from __future__ import annotations

from collections import namedtuple

import grpc
import pytest

from ps import errors
from ps.control.failures import MAX_TEXT, RETRYABLE, error_of, status_of
from ps.control.membership import NameTaken
from ps.errors import PsError

Item = namedtuple("Item", "key value")


class Failure(grpc.RpcError):
    """A failed call, as gRPC's client shows it."""

    def __init__(self, code: grpc.StatusCode, text: str, trailing: tuple[tuple[str, str], ...] = ()) -> None:
        super().__init__(text)
        self._parts = code, text, tuple(Item(*pair) for pair in trailing)

    def code(self) -> grpc.StatusCode:
        return self._parts[0]

    def details(self) -> str:
        return self._parts[1]

    def trailing_metadata(self) -> tuple[Item, ...]:  # type: ignore[override]  # the stubs name a private type
        return self._parts[2]


@pytest.mark.parametrize(
    "kind",
    [
        errors.Fenced,
        errors.WireError,
        errors.Refused,
        errors.ModelMismatch,
        errors.UnsupportedError,
        errors.ModelError,
        errors.ConfigError,
        errors.JobFailed,
    ],
)
def test_errors_travel_with_class_and_text(kind: type[PsError]) -> None:
    """What the coordinator raises is what the member gets, and none of it is retried."""
    code, text, trailing = status_of(kind("a reason"))
    assert code not in RETRYABLE
    arrived = error_of(Failure(code, text, trailing))
    assert type(arrived) is kind
    assert str(arrived) == "a reason"


def test_a_taken_name_is_a_refusal_for_the_caller() -> None:
    """`NameTaken` is the coordinator's own class."""
    assert type(error_of(Failure(*status_of(NameTaken("taken"))))) is errors.Refused


def test_long_texts_are_cut() -> None:
    """A traceback as a reason must not burst gRPC's header limit."""
    assert len(status_of(errors.JobFailed("x" * 10_000))[1]) == MAX_TEXT


@pytest.mark.parametrize("code", [code for code in grpc.StatusCode if code not in (*RETRYABLE, grpc.StatusCode.OK)])
def test_statuses_without_a_class_are_refusals(code: grpc.StatusCode) -> None:
    """Whatever else an endpoint may answer ends the call; the text names the status."""
    arrived = error_of(Failure(code, "what it said"))
    assert type(arrived) is errors.Refused
    assert "what it said" in str(arrived)


def test_only_four_statuses_are_retried() -> None:
    """ "You are not welcome" is never asked again."""
    assert {code.name for code in RETRYABLE} == {"UNAVAILABLE", "DEADLINE_EXCEEDED", "CANCELLED", "ABORTED"}
