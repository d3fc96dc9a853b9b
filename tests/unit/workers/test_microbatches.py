"""Gradient accumulation: means over the micro-batches that were really seen."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from ps.errors import ConfigError
from workers.microbatches import MicroBatches


def params(*sizes: int) -> list[nn.Parameter]:
    return [nn.Parameter(torch.zeros(size)) for size in sizes]


def give(param: nn.Parameter, value: float | None) -> None:
    param.grad = None if value is None else torch.full_like(param, value)


def test_one_passes_gradients_through() -> None:
    """Without accumulation nothing is copied, and every step is due."""
    (param,) = params(2)
    batches = MicroBatches([param], 1)
    give(param, 3.0)
    assert batches.add() and batches.take()[0] is param.grad and batches.calls == 0


def test_the_mean_of_k_even_when_gradients_are_cleared_in_between() -> None:
    """Gradients are summed in memory of their own: zero_grad, in place or not, takes nothing away."""
    (param,) = params(2)
    batches = MicroBatches([param], 3)
    for value, due in ((1.0, False), (2.0, False), (6.0, True)):
        give(param, value)
        assert batches.add() is due
        assert param.grad is not None
        param.grad.zero_()
    assert batches.calls == 3
    (mean,) = batches.take()
    assert mean is not None and mean.tolist() == [3.0, 3.0]
    assert batches.calls == 0 and batches.take() == [None]


def test_a_ragged_end_is_the_mean_of_what_was_seen() -> None:
    """Two of four: divided by two."""
    (param,) = params(1)
    batches = MicroBatches([param], 4)
    for value in (1.0, 2.0):
        give(param, value)
        batches.add()
    (mean,) = batches.take()
    assert mean is not None and mean.item() == 1.5


def test_gradients_of_parameters_that_the_optimizer_does_not_have_do_not_count() -> None:
    """Nobody clears them: they would make a micro-batch of each step without a backward."""
    first, other = params(1, 1)
    batches = MicroBatches([first, None], 2)
    give(first, 3.0)
    give(other, 1.0)
    batches.add()
    give(first, None)
    batches.add()
    mean, none = batches.take()
    assert mean is not None and mean.item() == 3.0 and none is None


def test_a_parameter_that_took_part_in_one_micro_batch_is_divided_by_all() -> None:
    """As with a loss divided by k; micro-batches without any gradient don't count."""
    first, second = params(1, 1)
    batches = MicroBatches([first, second], 3)
    for one, two in ((4.0, None), (None, None), (2.0, 8.0)):
        give(first, one)
        give(second, two)
        due = batches.add()
    assert due
    a, b = batches.take()
    assert a is not None and b is not None and (a.item(), b.item()) == (3.0, 4.0)


def test_dropped_micro_batches_are_forgotten() -> None:
    """Their samples go to somebody else."""
    (param,) = params(1)
    batches = MicroBatches([param], 2)
    give(param, 5.0)
    batches.add()
    batches.drop()
    assert batches.calls == 0
    assert not batches.add()


@pytest.mark.parametrize("every", [0, -1, 2.0, True, "4", None])
def test_nonsense_is_refused(every: object) -> None:
    """By name, with the value."""
    with pytest.raises(ConfigError, match=r"attach\(accumulate=.*at least 1"):
        MicroBatches([], every)  # type: ignore[arg-type]


def test_rows_of_embeddings_add_up_with_each_other_and_with_dense_gradients() -> None:
    """Sparse gradients stay sparse; once a dense one has come for the same weight, the sum is dense."""
    table = nn.Parameter(torch.zeros(3, 1))

    def rows(*ids: int) -> torch.Tensor:
        values = torch.ones(len(ids), 1)
        return torch.sparse_coo_tensor(torch.tensor([ids]), values, (3, 1), check_invariants=False)

    for grads, sparse in (
        ([rows(0, 1, 1), rows(1)], True),
        ([rows(0, 1, 1), torch.tensor([[0.0], [1.0], [0.0]])], False),
        ([torch.tensor([[0.0], [1.0], [0.0]]), rows(0, 1, 1)], False),
    ):
        batches = MicroBatches([table], 2)
        for grad in grads:
            table.grad = grad
            batches.add()
        (mean,) = batches.take()
        assert mean is not None and mean.is_sparse is sparse
        assert mean.to_dense().flatten().tolist() == [0.5, 1.5, 0.0]
