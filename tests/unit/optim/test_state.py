"""Optimizer state as bytes: what is packed comes back, and nothing else is taken for state of that shard and class."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import save
from torch import Tensor

from ps.errors import WireError
from ps.optim.spec import SERVED, served
from ps.optim.state import PieceEntries, pack, unpack
from ps.sharding.partition import make_plan
from ps.sharding.spec import ModelSignature, ParamSpec, Shard


def shard(dtype: str = "float32", *shapes: tuple[int, ...], whole: bool = False) -> Shard:
    params = tuple(ParamSpec(name=f"p{i}", shape=s, dtype=dtype, group=0) for i, s in enumerate(shapes or ((5,), (3,))))
    (made,) = make_plan(ModelSignature(params=params, optimizer="Adam", whole_tensors=whole), 1 << 20).shards
    return made


def adam(elems: int, dtype: torch.dtype = torch.float32, **more: Tensor) -> PieceEntries:
    return {"step": torch.tensor(3.0), "exp_avg": torch.randn(elems, dtype=dtype), **more}


@pytest.mark.parametrize("dtype", ["float32", "float64", "complex64", "complex128"])
def test_state_comes_back_bit_by_bit(dtype: str) -> None:
    """Per piece; one without state stays without; the payload owns its storage, as the transport wants."""
    real: torch.dtype = getattr(torch, dtype)
    pieces = [adam(5, real, exp_avg_sq=torch.randn(5, dtype=real)), {}]
    payload = pack(pieces)
    assert payload.untyped_storage().nbytes() == payload.numel()
    first, second = unpack(payload, shard(dtype), served("Adam"))
    assert second == {} and list(first) == ["step", "exp_avg", "exp_avg_sq"]
    assert all(torch.equal(first[key], value) and first[key].dtype is value.dtype for key, value in pieces[0].items())


def test_state_of_16_bit_parameters_is_float32() -> None:
    """It is that of their masters."""
    payload = pack([adam(5, exp_avg_sq=torch.ones(5)), {}])
    assert unpack(payload, shard("bfloat16"), served("Adam"))[0]["exp_avg"].dtype is torch.float32


GOOD = torch.ones(5)
NAN = torch.tensor([1.0, float("nan"), 1.0, 1.0, 1.0])


@pytest.mark.parametrize(
    ("tensors", "words"),
    [
        ({"0.step": torch.tensor(1.0), "0.exp_avg": GOOD}, "Adam lacks 0.exp_avg_sq"),
        ({"0.step": torch.tensor(1)}, r"0.step is torch.int64 \[\], expected torch.float32"),
        ({"0.step": torch.ones(1)}, r"0.step is torch.float32 \[1\], expected torch.float32 \[\]"),
        ({"0.step": torch.tensor(1.0), "0.exp_avg": torch.ones(4)}, r"0.exp_avg is torch.float32 \[4\], expected"),
        ({"0.step": torch.tensor(1.0), "0.exp_avg": GOOD.double()}, "0.exp_avg is torch.float64"),
        ({"0.step": torch.tensor(1.0), "0.exp_avg": NAN}, "0.exp_avg holds inf or NaN"),
        ({"0.sum": GOOD}, "'0.sum' is not part of it"),
        ({"2.step": torch.tensor(1.0)}, "'2.step' is not part of it"),
    ],
)
def test_what_is_no_state_of_the_shard_is_refused(tensors: dict[str, Tensor], words: str) -> None:
    """By the entry's name, before anything is changed."""
    payload = torch.frombuffer(bytearray(save(tensors)), dtype=torch.uint8)
    with pytest.raises(WireError, match=words):
        unpack(payload, shard(), served("Adam"))


@pytest.mark.parametrize("nbytes", [0, 7, 100])
def test_bytes_that_are_no_file_are_refused(nbytes: int) -> None:
    """Whatever they are."""
    with pytest.raises(WireError, match="optimizer state of shard 0"):
        unpack(torch.full((nbytes,), 255, dtype=torch.uint8), shard(), served("Adam"))


def test_factors_fit_matrices_only() -> None:
    """Adafactor keeps rows and columns of a matrix, and all elements of a vector."""
    matrix, vector = shard("float32", (4, 6), whole=True), shard("float32", (4,), whole=True)
    step = torch.tensor(1.0)
    factors = {"step": step, "row_var": torch.ones(4, 1), "col_var": torch.ones(1, 6)}
    assert unpack(pack([factors]), matrix, served("Adafactor"))[0].keys() == factors.keys()
    with pytest.raises(WireError, match=r"0.row_var makes no sense for shape \[4\]"):
        unpack(pack([{"step": step, "row_var": torch.ones(4, 1)}]), vector, served("Adafactor"))


@pytest.mark.parametrize("name", SERVED)
def test_the_table_knows_what_each_class_keeps(name: str) -> None:
    """After a step with everything switched on, a class's state has the keys of the table, in that order."""
    options = {"momentum": 0.9, "centered": True, "amsgrad": True}
    kind = getattr(torch.optim, name)
    param = torch.nn.Parameter(torch.ones(3, 2))
    taken = {key: value for key, value in options.items() if key in kind.__init__.__code__.co_varnames}
    optimizer = kind([param], lr=0.1, **taken)
    grad = torch.ones(3, 2)
    param.grad = grad.to_sparse(1) if name == "SparseAdam" else grad
    optimizer.step()
    keys = [key.name for key in served(name).state if not (name == "Adafactor" and key.name == "variance")]
    assert list(optimizer.state[param]) == keys
