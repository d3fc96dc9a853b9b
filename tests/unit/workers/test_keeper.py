"""Which process groups the keeper kills."""

from __future__ import annotations

from workers.keeper import remaining


def test_groups_on_the_list() -> None:
    """What was added and not taken off, in order; lines that were cut off and dangerous numbers never count."""
    assert remaining(["+12\n", "+13\n", "-12\n", "+14\n"]) == [13, 14]
    assert remaining(["+12\n", "+12\n", "-12\n"]) == []
    assert remaining(["+0\n", "+1\n", "+-1\n", "12\n", "\n", "+", "-99\n"]) == []
