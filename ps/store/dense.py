"""DenseShard: the weights of one shard in memory of its own, its optimizer and its version.

Weights are dense; gradients are too, or hold some rows only.

float16 and bfloat16 shards keep float32 master weights: thousands of updates too small for the wire's dtype add up.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ps.optim.spec import ServedOptimizer
from ps.optim.state import MASTER_DTYPES, PieceEntries
from ps.optim.tensors import Optimizer, optimizer_for
from ps.sharding.layout import ROW_ID_BYTES, values_offset
from ps.sharding.spec import Shard
from ps.types import DENSE, Hyper, Incarnation, Version

_OWN_KEPT = 64
"""How many of a worker's own latest pushes are remembered; a worker has a few in flight."""


def split_rows(spec: Shard, region: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    """Row ids and flat values of a gradient of `rows` rows in its bytes: views."""
    dtype: torch.dtype = getattr(torch, spec.dtype)
    values = region[values_offset(rows) :].view(dtype)[: rows * spec.row_elems]
    return region[: rows * ROW_ID_BYTES].view(torch.int64), values


@dataclass(frozen=True, slots=True, kw_only=True)
class ShardState:
    """All of a shard that outlives its process. Copies, so they may be kept while the shard goes on."""

    version: Version
    pushes: int
    weights: Tensor
    """Flat, in the dtype of the master weights."""
    optimizer: tuple[PieceEntries, ...]
    """Of each piece."""


class DenseShard:
    """One shard. Not thread-safe: the shard's lock guards it, but `version` may be read without (a moment old)."""

    def __init__(self, spec: Shard, epoch: int, optimizer: ServedOptimizer, *, exact: bool) -> None:
        self.spec = spec
        self.dtype: torch.dtype = getattr(torch, spec.dtype)
        """On the wire."""
        self._has_master = self.dtype in MASTER_DTYPES
        self.version = Version(epoch, 0)
        self.pushes = 0
        """Pushes applied, over all epochs."""
        self.dropped = 0
        """Pushes that the consistency choice left out."""
        self.shrunk = 0
        """Rounds that closed without a worker they had counted on."""
        self.staleness: Counter[int] = Counter()
        """Staleness of each push applied → how many."""
        self._served = optimizer
        self._exact = exact
        self._weights = torch.empty(0)
        self._optimizer: Optimizer | None = None
        self._own: dict[Incarnation, deque[int]] = {}
        """Counters of a worker's own pushes that it may not have seen yet, ascending; dropped by `forget`."""

    @property
    def initialised(self) -> bool:
        """Whether it has weights."""
        return self._optimizer is not None

    @property
    def device(self) -> torch.device:
        """Where the weights are: where the initial ones were."""
        return self._weights.device

    def load(self, region: Tensor) -> None:
        """Take initial weights from the shard's bytes, copying them; optimizer state starts afresh."""
        self._weights = region.view(self.dtype).to(MASTER_DTYPES.get(self.dtype, self.dtype), copy=True)
        self._clear_padding()
        self._optimizer = optimizer_for(self.spec, self._served, self._weights, exact=self._exact)

    def replace(self, region: Tensor) -> None:
        """Take other weights from the shard's bytes, copying them: a new version. Optimizer state stays as it is."""
        assert self._optimizer is not None, f"shard {self.spec.id} has no weights"
        self._weights.copy_(region.view(self.dtype))
        self._clear_padding()
        self.version = Version(self.version.epoch, self.version.counter + 1)

    def export_state(self) -> ShardState:
        """What `import_state` takes, now."""
        return ShardState(
            version=self.version,
            pushes=self.pushes,
            weights=self._weights.clone(),
            optimizer=self.optimizer_state(),
        )

    def import_state(self, state: ShardState) -> None:
        """Go on from this state, in the epoch that the shard has. Copies. It must be of a shard with the same spec."""
        self._weights = state.weights.clone()
        self._optimizer = optimizer_for(self.spec, self._served, self._weights, exact=self._exact)
        self._optimizer.import_state(state.optimizer)
        self.version = Version(self.version.epoch, state.version.counter)
        self.pushes = state.pushes
        self._own.clear()

    def optimizer_state(self) -> tuple[PieceEntries, ...]:
        """A copy of the optimizer's state, per piece."""
        assert self._optimizer is not None, f"shard {self.spec.id} has no weights"
        return tuple(self._optimizer.export_state())

    def set_optimizer_state(self, pieces: Sequence[PieceEntries]) -> None:
        """Replace the optimizer's state, copying; no new version. It has been checked as `optim.state.unpack` does."""
        assert self._optimizer is not None, f"shard {self.spec.id} has no weights"
        self._optimizer.import_state(pieces)

    def write(self, out: Tensor) -> None:
        """Copy the weights to `out`, flat, in the wire's dtype."""
        out.copy_(self._weights)

    def staleness_of(self, incarnation: Incarnation, base: Version) -> int | None:
        """Versions applied by *other* workers since `base`, for a push of `incarnation` that is to be applied now.

        The worker's own pushes after `base` (which it sent before their weights had come back) don't count. None
        when `base` is of another epoch: counters of different epochs say nothing about each other.
        """
        if base.epoch != self.version.epoch:
            return None
        behind = self.version.counter - base.counter
        own = self._own.get(incarnation)
        if not own:
            return behind
        while own and own[0] <= base.counter:
            own.popleft()
        return behind - len(own)

    def gradient(self, region: Tensor | None, rows: int) -> Tensor | None:
        """The gradient in the bytes of a push, in the weights' dtype, as `optim.tensors.Optimizer.apply` takes it.

        None = none. A view of `region` where it can be one. Of a shard whose gradients travel as rows, `rows` says how
        many there are, and `region` may be None for none; what is in it has been checked.
        """
        if self.spec.row_elems:
            return self._sparse(region, rows)
        if region is None:
            return None
        grads = region.view(self.dtype)
        return grads.to(self._weights.dtype) if self._has_master else grads

    def _sparse(self, region: Tensor | None, rows: int) -> Tensor:
        shape = self.spec.pieces[0].shape
        assert shape is not None, self.spec.id
        if region is None or not rows:
            ids = torch.empty(1, 0, dtype=torch.int64, device=self.device)
            values = torch.empty(0, *shape[1:], dtype=self._weights.dtype, device=self.device)
        else:
            numbers, flat = split_rows(self.spec, region, rows)
            ids = (numbers - self.spec.rows.start).unsqueeze(0)
            values = flat.view(rows, *shape[1:]).to(self._weights.dtype)
        return torch.sparse_coo_tensor(ids, values, shape, check_invariants=False, is_coalesced=True)

    def apply(
        self,
        incarnation: Incarnation,
        region: Tensor | None,
        present: bytes,
        hyper: Hyper,
        staleness: int | None,
        rows: int = DENSE,
    ) -> None:
        """Apply one push: an optimizer step on the pieces present, and a new version. None = no gradient at all."""
        self._step(self.gradient(region, rows), present, hyper)
        self._count(staleness)
        own = self._own.get(incarnation)
        if own is None:
            own = self._own[incarnation] = deque(maxlen=_OWN_KEPT)
        own.append(self.version.counter)

    def apply_round(
        self, gradient: Tensor | None, present: bytes, hyper: Hyper, staleness: Sequence[int | None]
    ) -> None:
        """Apply one round: one optimizer step with the mean of its pushes, and one new version.

        `gradient` is as `gradient()` gives it; `staleness` has an entry for each push.
        """
        self._step(gradient, present, hyper)
        for versions in staleness:
            self._count(versions)

    def _step(self, gradient: Tensor | None, present: bytes, hyper: Hyper) -> None:
        assert self._optimizer is not None, f"shard {self.spec.id} has no weights"
        if gradient is not None:
            self._optimizer.apply(gradient, present, hyper)
        self.version = Version(self.version.epoch, self.version.counter + 1)

    def _count(self, staleness: int | None) -> None:
        self.pushes += 1
        if staleness is not None:
            self.staleness[staleness] += 1

    def begin_epoch(self, epoch: int) -> None:
        """Start a new epoch with the weights and state it has."""
        self.version = Version(epoch, 0)
        self._own.clear()

    def forget(self, incarnation: Incarnation) -> None:
        """Drop what is remembered of a worker that is gone."""
        self._own.pop(incarnation, None)

    def _clear_padding(self) -> None:
        at = 0
        for piece in self.spec.pieces:
            self._weights[at : piece.offset].zero_()
            at = piece.offset + piece.numel
        self._weights[at:].zero_()
