"""Whatever can't be right is refused with its reason before it touches state."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from ps.rpc.wire import Caller, Init, Push, Request
from ps.types import Incarnation, ShardId, Version
from tests.support.shards import SECRET, Client, started


def with_caller(request: Request, **fields: object) -> Request:
    return replace(request, caller=replace(request.caller, **fields))  # type: ignore[arg-type]


def with_part(request: Push, **fields: object) -> Push:
    return replace(request, shards=(replace(request.shards[0], **fields), *request.shards[1:]))  # type: ignore[arg-type]


def good(client: Client) -> tuple[Push, Tensor]:
    return client.push_request(0, client.all), client.payload(1.0, client.all)


def check_untouched(client: Client) -> None:
    assert client.weights(client.pull().payload) == [0.0] * 3
    assert [row.next_sequence for row in client.hello().reply.shards] == [0] * 3


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"shard_epoch": 1, "base": Version(1, 1)}, r"base \(1, 1\) is ahead of version \(1, 0\)"),
        ({"base": Version(2, 0)}, r"base \(2, 0\) is ahead"),
        ({"present": b""}, "bitmap of 0 bytes doesn't fit 1 pieces"),
        ({"present": b"\x01\x00"}, "bitmap of 2 bytes"),
        ({"present": b"\x02"}, "bitmap of 1 bytes doesn't fit"),
        ({"shard": ShardId(3)}, "names shard 3; the plan has 3"),
        ({"shard": ShardId(1)}, "names a shard twice"),
    ],
)
def test_bad_shards_of_a_push(fields: dict[str, object], reason: str) -> None:
    """Bases from the future, bitmaps that don't fit, shards that don't exist: refused whole, nothing is applied."""
    _, client = started()
    request, payload = good(client)
    answer = client.submit(with_part(request, **fields), payload)
    assert re.search(reason, answer.reply.refused), answer.reply.refused
    check_untouched(client)


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"groups": ()}, "group 0, the push has hyper-parameters of 0 groups"),
        ({"groups": ((("lr", 0.1),),)}, "group 0: SGD takes lr, momentum"),
        ({"sequence": -1}, "push number -1 is out of range"),
        ({"sequence": 1 << 62}, "out of range"),
        ({"poll": True}, "a poll carries no payload"),
        ({"shards": ()}, "names no shard"),
    ],
)
def test_bad_numbers_of_a_push(fields: dict[str, object], reason: str) -> None:
    """Incomplete groups, numbers out of range, polls with payload, no shards."""
    _, client = started()
    request, payload = good(client)
    answer = client.submit(replace(request, **fields), payload)  # type: ignore[arg-type]
    assert reason in answer.reply.refused
    check_untouched(client)


def test_hyper_parameters_that_the_class_refuses() -> None:
    """A negative learning rate is refused before the push is accepted, naming group and class."""
    _, client = started()
    request, payload = good(client)
    groups = ((("lr", -1.0), *request.groups[0][1:]),)
    answer = client.submit(replace(request, groups=groups), payload)
    assert "group 0: SGD refuses its hyper-parameters: Invalid learning rate" in answer.reply.refused
    check_untouched(client)


@pytest.mark.parametrize("kind", ["short", "long", "dtype", "shape", "strided", "missing"])
def test_bad_payloads(kind: str) -> None:
    """Wrong size, dtype, shape, strides, or none although pieces are marked as present."""
    _, client = started()
    request, payload = good(client)
    bad = {
        "short": payload[:-64],
        "long": torch.cat([payload, payload[:64]]),
        "dtype": payload.view(torch.float32),
        "shape": payload.view(-1, 64),
        "strided": torch.cat([payload, payload])[::2],
        "missing": payload[:0],
    }[kind]
    assert "payload" in client.submit(request, bad).reply.refused
    check_untouched(client)


def test_initial_weights_need_their_payload() -> None:
    """An Init of the wrong size is refused."""
    _, client = started()
    request = Init(caller=client.caller, shards=((ShardId(0), 1),))
    assert "payload has 0 bytes" in client.submit(request).reply.refused


def test_strangers_are_fenced_and_liars_refused() -> None:
    """An incarnation that is not admitted is told so; a wrong or empty secret is refused; neither is printed."""
    _, client = started()
    request, payload = good(client)
    stranger = client.submit(with_caller(request, incarnation=Incarnation(77)), payload).reply
    assert stranger.fenced
    assert "not admitted" in stranger.refused
    for secret in (b"x" * 16, b"", SECRET[:-1]):
        liar = client.submit(with_caller(request, secret=secret), payload).reply
        assert liar.refused == "wrong secret for incarnation 10"
        assert not liar.fenced
    assert "secret" not in repr(Caller(incarnation=Incarnation(1), secret=SECRET, map_epoch=0))
    check_untouched(client)


def test_reasons_are_plain_text() -> None:
    """The wire takes ASCII without backslashes on one line."""
    _, client = started()
    request, payload = good(client)
    for bad in (replace(request, groups=()), with_part(request, present=b"\xff"), replace(request, sequence=-1)):
        reason = client.submit(bad, payload).reply.refused
        assert reason
        assert reason.isascii()
        assert "\\" not in reason
        assert "\n" not in reason


@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
def test_gradients_that_are_not_finite(bad: float) -> None:
    """A NaN that its worker did not notice is refused with the parameter's name, and applied nowhere."""
    _, client = started()
    request, payload = good(client)
    last = client.plan.shards[-1].pieces[-1]
    payload.view(torch.float32)[-client.plan.shards[-1].numel + last.offset] = bad
    answer = client.submit(request, payload)
    assert answer.reply.refused.startswith("the gradient of p1 in push 0 of incarnation 10 holds inf or NaN")
    assert not answer.reply.fenced
    check_untouched(client)
    assert client.push(0).statuses  # the same number, with good values


def test_padding_may_hold_anything() -> None:
    """Only gradients that would be applied count: what lies between them need not be finite."""
    _, client = started(300, 5)
    request, payload = good(client)
    spec = client.plan.shards[-1]
    gap = spec.pieces[-1].offset + spec.pieces[-1].numel
    assert gap < spec.numel
    payload.view(torch.float32)[-spec.numel + gap :] = float("nan")
    assert client.submit(request, payload).statuses
