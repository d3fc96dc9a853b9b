"""The remote surface: whatever arrives is answered, and nothing is raised."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from typing import cast

import pytest
import torch
from torch import Tensor

from ps.rpc import endpoints
from ps.rpc import payload as payloads
from ps.rpc.transport import Answer, ShardHost
from ps.rpc.wire import WIRE_FORMAT, Caller, Hello, Reply, Request, reply_from_wire, to_wire
from ps.types import Incarnation

HEADER = to_wire(Hello(caller=Caller(incarnation=Incarnation(7), secret=b"s" * 16, map_epoch=0), shards=()))


class Host:
    """Keeps the requests that reach it, and their answers."""

    def __init__(self) -> None:
        self.seen: list[Request] = []
        self.answers: list[Answer] = []

    def submit(self, request: Request, payload: Tensor, answer: Answer) -> None:
        self.seen.append(request)
        self.answers.append(answer)


@pytest.fixture
def host() -> Iterator[Host]:
    made = Host()
    endpoints.install(made, Incarnation(3))
    yield made
    endpoints.uninstall()


def answered(future: object) -> tuple[Reply, Tensor]:
    done = cast(endpoints.Answered, future)
    assert done.done()
    header, payload = done.value()
    return reply_from_wire(header), payload


@pytest.mark.parametrize(
    "arguments",
    [
        (),
        (HEADER,),
        (HEADER, payloads.empty(), 1),
        (HEADER, None),
        (HEADER, torch.zeros(3)),
        (HEADER, torch.zeros(8, dtype=torch.uint8)[:2]),
        (payloads.empty(), HEADER),
        ((1, 2, 3), payloads.empty()),
        ("x" * 100, payloads.empty()),
    ],
    ids=str,
)
def test_odd_calls_are_refused(host: Host, arguments: tuple[object, ...]) -> None:
    """Wrong numbers, kinds and contents of arguments never reach the host and never raise."""
    reply, payload = answered(endpoints.call(*arguments))
    assert reply.refused
    assert payload.numel() == 0
    assert host.seen == []


def test_keywords_are_refused(host: Host) -> None:
    """There is one way to call."""
    assert answered(endpoints.call(header=HEADER, payload=payloads.empty()))[0].refused


def test_process_without_shards_says_so() -> None:
    """A worker that is called by mistake answers."""
    assert "serves no shards" in answered(endpoints.call(HEADER, payloads.empty()))[0].refused
    assert endpoints.greet() == (WIRE_FORMAT, 0)
    assert endpoints.shards() is None


def test_greeting_names_the_incarnation(host: Host) -> None:
    """Callers learn whom they have reached, whatever they send."""
    assert endpoints.greet("any", thing=1) == (WIRE_FORMAT, 3)


def test_shards_never_leave(host: Host) -> None:
    """What an RRef stands for can't be fetched by anybody."""
    shards = endpoints.shards()
    assert shards is not None
    assert shards.incarnation == 3
    with pytest.raises(TypeError, match="can't be copied"):
        pickle.dumps(shards)


def test_answer_lets_go_of_the_payload(host: Host) -> None:
    """A host that keeps `answer` keeps no snapshot alive, else pooled buffers never came back."""
    future = endpoints.call(HEADER, payloads.empty())
    host.answers[0](Reply(), payloads.empty())
    assert answered(future)[0] == Reply()
    assert host.answers[0]._future is None  # type: ignore[attr-defined]


def test_one_host_per_process(host: Host) -> None:
    """A second host would hide the first."""
    with pytest.raises(RuntimeError, match="already served"):
        endpoints.install(cast(ShardHost, host), Incarnation(4))


def test_late_answers_after_uninstall_do_not_raise(host: Host) -> None:
    """A server that is closing may still be answering."""
    future = endpoints.call(HEADER, payloads.empty())
    endpoints.uninstall()
    host.answers[0](Reply(), payloads.empty())
    assert cast("endpoints.Answered", future).done()
