"""Payloads own exactly their storage."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from ps.errors import WireError
from ps.rpc import payload as payloads


def test_slice_shares_memory_but_not_storage() -> None:
    """`over` makes no copy, and the storage is the slice's bytes only."""
    buffer = np.zeros(1000, dtype=np.uint8)
    piece = payloads.over(buffer, 128, 256)
    piece.fill_(7)
    assert buffer.sum() == 7 * 128
    assert piece.untyped_storage().nbytes() == 128


def test_slice_of_a_tensor() -> None:
    """A torch buffer can be sliced as well."""
    buffer = torch.zeros(1000, dtype=torch.uint8)
    payloads.over(buffer, 10, 20).fill_(1)
    assert int(buffer.sum()) == 10


def test_slice_keeps_the_buffer_alive() -> None:
    """The memory lives as long as the payload."""
    piece = payloads.over(np.full(1 << 16, 3, dtype=np.uint8), 0, 64)
    assert int(piece.sum()) == 192


def test_empty_slice_is_a_payload() -> None:
    """Bounds may meet."""
    assert payloads.over(np.zeros(8, dtype=np.uint8), 8, 8).numel() == 0
    assert payloads.check(payloads.empty()).numel() == 0


@pytest.mark.parametrize(("begin", "end"), [(-1, 2), (3, 2), (0, 9)])
def test_slice_out_of_bounds(begin: int, end: int) -> None:
    """Python's forgiving slices are not for wire offsets."""
    with pytest.raises(ValueError, match="of 8 bytes"):
        payloads.over(np.zeros(8, dtype=np.uint8), begin, end)


def test_buffer_of_another_kind() -> None:
    """Only flat contiguous bytes can be sliced."""
    for buffer in (np.zeros(8, dtype=np.float32), np.zeros((2, 4), dtype=np.uint8), np.zeros(8, dtype=np.uint8)[::2]):
        with pytest.raises(ValueError, match="flat contiguous uint8"):
            payloads.over(buffer)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("payload", "complaint"),
    [
        (None, "NoneType"),
        (b"bytes", "bytes"),
        (torch.nn.Parameter(torch.zeros(1), requires_grad=False), "Parameter"),
        (torch.zeros(4), "torch.float32"),
        (torch.zeros((2, 2), dtype=torch.uint8), "2 dimensions"),
        (torch.zeros((), dtype=torch.uint8), "0 dimensions"),
        (torch.zeros(8, dtype=torch.uint8)[:4], "4 bytes in a storage of 8"),
        (torch.zeros(1, dtype=torch.uint8).expand(4), "4 bytes in a storage of 1"),
        (torch.zeros(4, dtype=torch.uint8, device="meta"), "only CPU"),
    ],
)
def test_what_can_not_travel(payload: object, complaint: str) -> None:
    """Each kind of tensor that would cost, abort or leak is refused by name."""
    with pytest.raises(WireError, match=complaint):
        payloads.check(payload)


def test_an_alias_of_a_pooled_buffer_is_a_payload() -> None:
    """Replies send `.detach()` aliases of snapshots."""
    assert payloads.check(torch.zeros(64, dtype=torch.uint8).detach()).numel() == 64
