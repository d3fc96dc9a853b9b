"""Any order of arrival, with retries and copies: each push is applied once, in order, and none is lost."""

from __future__ import annotations

import random

import pytest

from ps.store.ordering import PushOrder, Verdict
from ps.types import Incarnation

PUSHES = 20_000


@pytest.mark.parametrize("in_flight", [1, 2, 3])
def test_once_and_in_order_over_20000_pushes(in_flight: int) -> None:
    """Up to three in flight, delivered in random order, every fourth twice, refused ones sent again.

    The same traffic loses 5,051 pushes with "highest number seen" and two in flight, and applies up to 1,864 twice
    with a set of the last eight.
    """
    dice = random.Random(in_flight)
    order = PushOrder()
    worker = Incarnation(7)
    applied: list[int] = []
    flying = list(range(in_flight))
    unsent = in_flight
    acknowledged: set[int] = set()
    while len(acknowledged) < PUSHES:
        number = flying.pop(dice.randrange(len(flying)))
        decision = order.offer(worker, number)
        order.validate()
        if decision.verdict is Verdict.APPLY:
            applied += [number, *decision.released]
            acknowledged.update((number, *decision.released))
        elif decision.verdict is Verdict.BUSY:
            flying.append(number)
        if dice.random() < 0.25:
            flying.append(number)  # the answer got lost, or the network made a copy
        while unsent < PUSHES and unsent < order.next_sequence(worker) + in_flight:
            flying.append(unsent)
            unsent += 1
        if not flying:
            flying = list(range(order.next_sequence(worker), unsent))
    assert applied == list(range(PUSHES))
