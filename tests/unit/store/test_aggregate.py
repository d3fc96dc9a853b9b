"""Sums of rounds: the same bits in any order of arrival, no payload longer than needed, absent pieces and rows."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from ps.sharding.spec import Piece, Shard
from ps.store.aggregate import Aggregate, Contribution, everything, union
from ps.types import Incarnation, ShardId

PIECES = (
    Piece(param=0, begin=0, end=16, offset=0),
    Piece(param=1, begin=0, end=10, offset=16),
    Piece(param=2, begin=0, end=16, offset=32),
)
SHARD = Shard(id=ShardId(0), dtype="float32", group=0, pieces=PIECES, numel=48)


def push(worker: int, gradient: Tensor | None, present: int = 0b111, sequence: int = 0) -> Contribution:
    return Contribution(
        key=(Incarnation(worker), sequence),
        gradient=gradient,
        present=bytes([present]),
        hyper=(("lr", float(worker)),),
        staleness=worker,
    )


def gradients(count: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(48, generator=generator) for _ in range(count)]


def closed(aggregate: Aggregate, pushes: Sequence[Contribution], round_number: int = 0) -> Tensor:
    for one in pushes:
        aggregate.add(round_number, one)
    mean, _ = aggregate.close(round_number, [one.key for one in pushes])
    assert mean.gradient is not None
    return mean.gradient.clone()


def test_in_order_any_arrival_gives_the_same_bits() -> None:
    """((g1 + g2) + g3) / 3 by number of worker, as plain PyTorch accumulates; as they come only nearly so."""
    grads = gradients(3)
    expected = ((grads[0] + grads[1]) + grads[2]) / 3
    ordered, loose = Aggregate(SHARD, ordered=True), Aggregate(SHARD, ordered=False)
    for order in itertools.permutations(range(3)):
        pushes = [push(10 + index, grads[index].clone()) for index in order]
        assert torch.equal(closed(ordered, pushes), expected)
        pushes = [push(10 + index, grads[index].clone()) for index in order]
        torch.testing.assert_close(closed(loose, pushes), expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("ordered", [True, False])
def test_one_push_is_its_own_mean(ordered: bool) -> None:
    """Not copied, not divided; hyper-parameters and staleness are its own."""
    aggregate = Aggregate(SHARD, ordered=ordered)
    gradient = gradients(1)[0]
    assert aggregate.add(0, push(10, gradient)) == []
    mean, kept = aggregate.close(0, [(Incarnation(10), 0)])
    assert mean.gradient is gradient and len(kept) == 1
    assert (mean.hyper, mean.staleness) == ((("lr", 10.0),), (10,))


def test_the_lowest_numbered_worker_says_the_hyper_parameters() -> None:
    """Whoever came first."""
    aggregate = Aggregate(SHARD, ordered=True)
    for worker, gradient in zip((12, 10, 11), gradients(3), strict=True):
        aggregate.add(0, push(worker, gradient))
    mean, _ = aggregate.close(0, [(Incarnation(worker), 0) for worker in (10, 11, 12)])
    assert (mean.hyper, mean.staleness) == ((("lr", 10.0),), (10, 11, 12))


def test_payloads_are_let_go_as_soon_as_they_are_summed() -> None:
    """As they come: the first waits for the second, all later ones are added at once. In order: all wait."""
    loose, ordered = Aggregate(SHARD, ordered=False), Aggregate(SHARD, ordered=True)
    pushes = [push(10 + index, gradient) for index, gradient in enumerate(gradients(4))]
    assert [len(loose.add(0, one)) for one in pushes] == [0, 2, 1, 1]
    assert all(one.gradient is None for one in pushes)
    pushes = [push(10 + index, gradient) for index, gradient in enumerate(gradients(4))]
    assert [len(ordered.add(0, one)) for one in pushes] == [0, 0, 0, 0]
    _, kept = ordered.close(0, [one.key for one in pushes])
    assert kept == pushes and all(one.gradient is None for one in pushes[:2])


@pytest.mark.parametrize("ordered", [True, False])
def test_absent_pieces_count_as_zero_and_their_memory_is_not_read(ordered: bool) -> None:
    """Where any push has a piece it is divided by the number of all; what absent ones hold is garbage."""
    one, two, three = gradients(3)
    one[16:26], two[0:26], three[:] = torch.nan, torch.nan, torch.nan
    pushes = [push(10, one, 0b101), push(11, two, 0b100), push(12, three, 0b000)]
    mean = closed(Aggregate(SHARD, ordered=ordered), pushes)
    assert torch.equal(mean[0:16], one[0:16] / 3)
    assert torch.equal(mean[32:48], (one + two)[32:48] / 3)


@pytest.mark.parametrize("ordered", [True, False])
def test_pushes_without_any_gradient_count(ordered: bool) -> None:
    """They make the mean smaller; the one gradient there is stays untouched in its borrowed memory."""
    aggregate = Aggregate(SHARD, ordered=ordered)
    gradient = gradients(1)[0]
    before = gradient.clone()
    empty = push(10, None, 0)
    assert aggregate.add(0, empty) == [empty]
    mean = closed_with(aggregate, [push(11, gradient)], [(Incarnation(10), 0), (Incarnation(11), 0)])
    assert torch.equal(mean, before / 2) and torch.equal(gradient, before)


def closed_with(
    aggregate: Aggregate, pushes: Sequence[Contribution], keys: Sequence[tuple[Incarnation, int]]
) -> Tensor:
    for one in pushes:
        aggregate.add(0, one)
    mean, _ = aggregate.close(0, keys)
    assert mean.gradient is not None
    return mean.gradient.clone()


def test_a_round_of_nothing() -> None:
    """No gradient at all: none to apply."""
    aggregate = Aggregate(SHARD, ordered=True)
    aggregate.add(0, push(10, None, 0))
    mean, kept = aggregate.close(0, [(Incarnation(10), 0)])
    assert mean.gradient is None and kept == []


def test_two_open_rounds_do_not_share_memory() -> None:
    """A newcomer may be a round ahead of a shard."""
    a, b, c, d = gradients(4)
    aggregate = Aggregate(SHARD, ordered=False)
    for number, worker, gradient in ((0, 10, a), (1, 10, c), (0, 11, b), (1, 11, d)):
        aggregate.add(number, push(worker, gradient.clone(), sequence=number))
    for number, total in ((0, a + b), (1, c + d)):
        mean, _ = aggregate.close(number, [(Incarnation(worker), number) for worker in (10, 11)])
        assert mean.gradient is not None and torch.equal(mean.gradient, total / 2)


def test_a_choice_of_pushes_leaves_the_others() -> None:
    """In order a round may take some of those that are there; a dropped one is gone."""
    a, b, c = gradients(3)
    aggregate = Aggregate(SHARD, ordered=True)
    for worker, gradient in ((10, a), (11, b), (12, c)):
        aggregate.add(0, push(worker, gradient.clone()))
    assert len(aggregate.drop((Incarnation(11), 0))) == 1 and aggregate.drop((Incarnation(11), 0)) == []
    first, _ = aggregate.close(0, [(Incarnation(12), 0)])
    assert first.gradient is not None and torch.equal(first.gradient, c)
    second, _ = aggregate.close(0, [(Incarnation(10), 0)])
    assert second.gradient is not None and torch.equal(second.gradient, a)


@pytest.mark.parametrize("ordered", [True, False])
def test_rows_are_summed_by_id_as_pytorch_accumulates_them(ordered: bool) -> None:
    """Bitwise the gradient that `backward` accumulates over the same batches, coalesced and divided."""
    shard = Shard(
        id=ShardId(0), dtype="float32", group=0, numel=96, row_elems=16,
        pieces=(Piece(param=0, begin=0, end=96, offset=0, shape=(6, 16)),),
    )  # fmt: skip
    torch.manual_seed(1)
    table = torch.nn.Embedding(6, 16, sparse=True)
    singles = []
    for ids in ([0, 3, 3, 5], [3, 1], [5, 5, 0, 3]):
        out: Tensor = table(torch.tensor(ids))
        singles.append(torch.autograd.grad((out * torch.randn_like(out)).sum(), [table.weight])[0].coalesce())
    total = ((singles[0] + singles[1]) + singles[2]).coalesce()
    aggregate = Aggregate(shard, ordered=ordered)
    pushes = [push(10 + index, single, 0b1) for index, single in enumerate(singles)]
    mean = closed(aggregate, pushes).coalesce()
    assert torch.equal(mean.indices(), total.indices())
    assert torch.equal(mean.values(), total.values() / 3)


def test_bitmaps() -> None:
    """All pieces, and those that any push has."""
    assert everything(9) == b"\xff\x01"
    assert union([b"\x01\x00", b"\x00\x01"]) == b"\x01\x01"
