"""A model's parameters: their gradients and weights into what is sent, and copy-in of what arrives.

Parameters stay where they are. Weights are written only here, through the Parameters and under `no_grad`, so that
autograd's version counters move; the caller sees to it that this is the thread that owns the model.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ps.errors import LocalWeightEdit, UnsupportedError
from ps.finite import all_finite
from ps.optim.spec import check_rows, served
from ps.sharding.spec import ShardingPlan
from ps.types import Hyper, ShardId
from workers.copyin import CopyIns
from workers.lanes import Lane, lane_for
from workers.model_buffers import ModelBuffers
from workers.routing import Message
from workers.rows import RowsOutgoing, as_rows
from workers.staging import Cut, Layout, Outgoing, Staged


class ModelMemory:
    """A model's parameters, the staging memory for their gradients, and the copy-in of their weights.

    Belongs to the thread that owns the model. Buffers given to the transport may be written again only when their
    call is over.
    """

    def __init__(
        self,
        plan: ShardingPlan,
        params: Sequence[Tensor],
        *,
        buffers: ModelBuffers | None = None,
        lanes: Callable[[int], Lane] | None = None,
    ) -> None:
        """`params` and, after them, `buffers` are those of the plan's signature. `lanes` gives the lane of one by its
        index there; unless given, there is one for each device."""
        self.layout = Layout(plan)
        self.buffers = buffers or ModelBuffers(())
        self.params = params = [*params, *self.buffers.tensors()]
        by_device = {device: lane_for(device) for device in dict.fromkeys(param.device for param in params)}
        self._lanes = [lanes(index) if lanes else by_device[param.device] for index, param in enumerate(params)]
        self._guarded = [index for index, spec in enumerate(plan.signature.params) if spec.group >= 0]
        self._sparse = [spec for spec in plan.signature.params if spec.sparse]
        self._seen: list[int] = []
        self._split = sorted(self.layout.split_params())
        # Flat copies, kept from step to step, of split parameters whose own memory is not row-major.
        self._scratch = {
            index: torch.empty(param.shape, dtype=param.dtype, device=param.device)
            for index, param in ((index, params[index]) for index in self._split)
            if not param.is_contiguous()
        }
        self._grad_scratch: dict[int, Tensor] = {}
        for index, flat in self._scratch.items():
            flat.copy_(params[index].detach())
        self._copy_ins = CopyIns(self.layout, self.params, self._scratch, self._lanes)

    def find_buffers(self) -> list[bool]:
        """Look where the buffers are now; returns for each entry of the signature whether it is a changed buffer."""
        changed = self.buffers.changed()
        count = len(self.params) - len(changed)
        self.params[count:] = self.buffers.tensors()
        for index in self._split:
            param = self.params[index]
            if index >= count and index not in self._scratch and not param.is_contiguous():
                self._scratch[index] = torch.empty(param.shape, dtype=param.dtype, device=param.device)
        return [False] * count + changed

    def staged(self, message: Message) -> Staged:
        """Staging memory for the gradients of a message."""
        rows = bool(self.layout.plan.shards[message.shards[0]].row_elems)
        return RowsOutgoing(self.layout, message) if rows else self.outgoing(message)

    def outgoing(self, message: Message) -> Outgoing:
        """Staging memory for the weights of a message."""
        return Outgoing(self.layout, message, self._lanes)

    @torch.no_grad()
    def stage_weights(self, out: Outgoing) -> None:
        """Write the parameters' values into a message."""
        out.gather(lambda cut: self._stretch(cut, self.params[cut.param]))
        out.ready()

    def finite(self, out: Outgoing) -> set[int]:
        """Which of the signature's entries in a message of buffers may be sent: not those that hold inf or NaN, if they
        are averaged."""
        params = self.layout.plan.signature.params
        if out.finite():
            return {cut.param for cut, _ in out.pieces}
        spoilt = {
            cut.param for cut, view in out.pieces if params[cut.param].buffer == "average" and not all_finite(view)
        }
        for index in sorted(spoilt):
            self.buffers.warn(params[index].name)
        return {cut.param for cut, _ in out.pieces} - spoilt

    @torch.no_grad()
    def stage_gradients(self, outs: Sequence[Staged], grads: Sequence[Tensor | None]) -> tuple[bool, ...]:
        """Write all gradients, of any stride, into messages; returns per parameter (and buffer) whether it has one."""
        grads = [*grads, *[None] * (len(self.params) - len(grads))]
        self._check_layouts(grads)
        specs = self.layout.plan.signature.params
        flat = {
            index: self._flat_gradient(index, grad)
            for index in self._split
            if (grad := grads[index]) is not None and not specs[index].sparse
        }
        given = [
            as_rows(grad, spec) if grad is not None and spec.sparse else grad
            for grad, spec in zip(grads, specs, strict=True)
        ]

        def source(cut: Cut) -> Tensor | None:
            if cut.whole or cut.param not in flat:
                return given[cut.param]
            return flat[cut.param][cut.begin : cut.end]

        for out in outs:
            out.gather(source)
        for out in outs:
            out.ready()
        return tuple(grad is not None for grad in grads)

    def _check_layouts(self, grads: Sequence[Tensor | None]) -> None:
        signature = self.layout.plan.signature
        optimizer = served(signature.optimizer)
        for spec, grad in zip(signature.params, grads, strict=True):
            if grad is None:
                continue
            dense = grad.layout is torch.strided
            if dense and not optimizer.dense:
                raise UnsupportedError(
                    f"the gradient of {spec.name!r} is dense, and {optimizer.name} does not support dense gradients; "
                    "is the weight used outside its embedding, too?"
                )
            if not dense and not spec.sparse:
                raise UnsupportedError(
                    f"the gradient of {spec.name!r} is sparse ({grad.layout}), but no nn.Embedding or nn.EmbeddingBag "
                    "of the model had it with sparse=True at attach(); make it one, or use sparse=False"
                )

    def _stretch(self, cut: Cut, tensor: Tensor) -> Tensor:
        """The part of `tensor` (row-major order) that a piece holds; a view, but for unusual strides."""
        flat = tensor.detach()
        return flat if cut.whole else flat.reshape(-1)[cut.begin : cut.end]

    def _flat_gradient(self, index: int, grad: Tensor) -> Tensor:
        """`grad` in row-major order: a view where its strides allow, else a copy in memory that is kept."""
        if grad.is_contiguous():
            return grad.view(-1)
        kept = self._grad_scratch.get(index)
        if kept is None:
            kept = self._grad_scratch[index] = torch.empty(grad.shape, dtype=grad.dtype, device=grad.device)
        return kept.copy_(grad).view(-1)

    def take(self, message: Message, payload: Tensor, shards: Sequence[ShardId]) -> None:
        """Copy the weights of `shards` out of a reply into the Parameters. The payload is only read."""
        self._copy_ins.run(message, payload, shards)

    def remember(self) -> None:
        """Note the parameters' version counters, after a copy-in."""
        params = self.params
        self._seen = [params[index]._version for index in self._guarded]

    def edited(self) -> int | None:
        """Index of the first trained parameter that was written by somebody else since `remember`, or None."""
        params = self.params
        if self._seen == [params[index]._version for index in self._guarded]:
            return None
        return next(
            index for index, seen in zip(self._guarded, self._seen, strict=True) if params[index]._version != seen
        )

    def check_rows(self, groups: Sequence[Hyper]) -> None:
        """Raise `UnsupportedError` for hyper-parameters that don't go with sparse gradients, naming the parameter."""
        optimizer = served(self.layout.plan.signature.optimizer)
        for spec in self._sparse:
            check_rows(optimizer, spec.name, groups[spec.group])

    def check_edits(self, step: int) -> None:
        """Raise `LocalWeightEdit` naming the first edited parameter. Edits through `.data` can't be seen."""
        index = self.edited()
        if index is not None:
            name = self.layout.plan.signature.params[index].name
            raise LocalWeightEdit(
                f"weights of {name!r} were changed locally before step {step}: "
                "the servers own the weights and would overwrite the change. Change weights before attach(), load "
                "others for everybody with worker.load(state_dict), or call worker.pull() to take the servers' again"
            )
