"""Records on the wire: what is refused, and what is never printed. Round trips: `tests/property/test_rpc_wire.py`."""

from __future__ import annotations

import pytest

from ps.errors import WireError
from ps.rpc.wire import MAX_INT, MAX_TEXT, WIRE_FORMAT, Caller, Hello, Push, ShardPush, from_wire, plain, to_wire
from ps.types import DENSE, MAX_INCARNATION, Incarnation, ShardId, Version


def test_the_secret_is_put_in_on_the_way() -> None:
    """Callers need not know the secret: the transport gives it."""
    caller = Caller(incarnation=Incarnation(1), secret=b"", map_epoch=0)
    parsed = from_wire(to_wire(Hello(caller=caller, shards=()), b"s" * 16))
    assert parsed.caller.secret == b"s" * 16


def test_another_format_is_refused_by_number() -> None:
    """A process of another release gets a sentence."""
    with pytest.raises(WireError, match=f"wire format integer 2, this process speaks {WIRE_FORMAT}"):
        from_wire((2, 1, b"s" * 16, 0, 1, ()))


def test_incarnations_of_aliases_are_refused() -> None:
    """Numbers from 16384 on are a caller's local names, never a member."""
    with pytest.raises(WireError, match="incarnation"):
        from_wire((WIRE_FORMAT, MAX_INCARNATION + 1, b"s" * 16, 0, 1, ()))


@pytest.mark.parametrize("rows", [-2, True, 1.0, None, MAX_INT + 1, b"1"])
def test_numbers_of_rows_are_minus_one_or_more(rows: object) -> None:
    """-1 says that a gradient is dense; anything else that is no count of rows is refused."""
    caller = Caller(incarnation=Incarnation(1), secret=b"s" * 16, map_epoch=0)
    part = ShardPush(shard=ShardId(0), shard_epoch=1, base=Version(1, 0), present=b"\x01")
    wire = to_wire(Push(caller=caller, sequence=0, samples=1, groups=(), shards=(part,)))
    assert from_wire(wire).shards == (part,)
    *head, shards, poll = wire
    assert isinstance(shards, tuple)
    ((*fields, dense),) = shards
    assert dense == DENSE
    with pytest.raises(WireError, match=r"rows: got .*, expected an integer from -1 to"):
        from_wire((*head, ((*fields, rows),), poll))


def test_secrets_never_reach_an_error_text() -> None:
    """Neither a short secret nor one in the wrong place is printed."""
    for wire in ((WIRE_FORMAT, 1, b"hidden", 0, 1, ()), (WIRE_FORMAT, b"hidden", 1, 0, 1, ()), (b"hidden", 1)):
        with pytest.raises(WireError) as caught:
            from_wire(wire)
        assert "hidden" not in str(caught.value)
    assert "hidden" not in repr(Caller(incarnation=Incarnation(1), secret=b"hidden", map_epoch=0))


def test_reasons_are_plain() -> None:
    """One line of ASCII without backslashes, bounded."""
    assert plain("a\\xff\n\u00e9\x00z") == "a?xff ??z"
    assert len(plain("x" * 10_000)) == MAX_TEXT
