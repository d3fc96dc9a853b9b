"""Ranks of process groups as scripts: forked off the zygote, trained on leased data; what they did is written down."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, distributed, nn
from torch.autograd import backward
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import StepLR

from tests.support.models import Mlp, batches
from tests.support.oracle import loss_of
from tests.support.zygote import Zygote
from workers import Worker, WorkerDrained

SAMPLES = 203
BATCH = 8
SEED = 3
RANKS = 2

Json = dict[str, Any]


def dataset() -> tuple[Tensor, Tensor, Tensor]:
    """Inputs, targets and sample numbers."""
    pairs = batches(SAMPLES)
    x, y = (torch.cat([pair[index] for pair in pairs])[:SAMPLES] for index in (0, 1))
    return x, y, torch.arange(SAMPLES)


def optimizer_for(params: list[Tensor]) -> Optimizer:
    """The optimizer of all groups, and of the oracle."""
    return AdamW(params, lr=0.01, weight_decay=0.1)


def start_group(
    zygote: Zygote,
    folder: Path,
    coordinator: str,
    name: str,
    script: str = "train",
    *,
    ranks: int = RANKS,
    **options: object,
) -> list[Path]:
    """Fork the ranks of a group; returns their exit-code files. Records go to `FOLDER/<name>.<rank>.pt`."""
    return [
        zygote.start(
            "rank", folder=str(folder), coordinator=coordinator, group=name, rank=rank, ranks=ranks, script=script,
            **options,
        )
        for rank in range(ranks)
    ]  # fmt: skip


def record(folder: Path, name: str, rank: int) -> Json:
    """What a rank wrote down."""
    found: Json = torch.load(folder / f"{name}.{rank}.pt", weights_only=False)
    return found


def run_rank(job: Json) -> int:
    """One rank, in a process of its own."""
    import workers

    os.environ["PS_NAME"] = job["group"]
    rendezvous = Path(job["folder"]) / f"{job['group']}.rendezvous"
    distributed.init_process_group(
        "gloo", init_method=f"file://{rendezvous}", rank=job["rank"], world_size=job["ranks"]
    )
    try:
        with workers.join(job["coordinator"]) as worker:
            _SCRIPTS[job["script"]](worker, job)
    except WorkerDrained as drained:
        return int(drained.code or 0)
    finally:
        distributed.destroy_process_group()
    return 0


def build(job: Json) -> tuple[nn.Module, Mlp]:
    """The model as the loop calls it, and as it is. Every rank starts with other weights."""
    torch.manual_seed(job["rank"])
    plain = Mlp()
    return DistributedDataParallel(plain), plain


def train(worker: Worker, job: Json) -> None:
    """Train on leased data; write down batches, gradients, and versions of shards after each step."""
    model, plain = build(job)
    params: list[Tensor] = list(plain.parameters())
    optimizer = worker.attach(model, optimizer_for(params))
    kept: Json = {"start": [param.detach().clone() for param in params], "seen": [], "grads": [], "versions": []}
    path = Path(job["folder"]) / f"{job['group']}.{job['rank']}"
    for epoch in worker.epochs(dataset(), batch_size=BATCH, count=job.get("epochs", 2), seed=SEED):
        for x, y, ids in epoch:
            _interrupt(job, len(kept["seen"]), path)
            optimizer.zero_grad()
            backward(loss_of(model, x, y))
            kept["grads"].append([param.grad.clone() for param in params if param.grad is not None])
            optimizer.step()
            kept["seen"].append((epoch.index, ids.tolist()))
            kept["versions"].append(versions(worker))
            with path.with_name(path.name + ".seen").open("a") as lines:
                lines.write(" ".join(map(str, (epoch.index, *ids.tolist()))) + "\n")
    worker.report(rank=job["rank"])
    kept["after"] = [param.detach().clone() for param in params]
    kept["step"] = worker.global_step
    torch.save(kept, path.with_name(path.name + ".pt"))


def _interrupt(job: Json, step: int, path: Path) -> None:
    """What the test wants to happen to this rank at this step."""
    wanted = cast(Json, job.get("at", {})).get(str(job["rank"]))
    if wanted is None or step != wanted["step"]:
        return
    if wanted["do"] == "raise":
        raise ValueError("raised by the script")
    os.kill(os.getpid(), wanted["do"])


def versions(worker: Worker) -> list[int]:
    """Version of each shard that the weights have now; empty on ranks that don't know."""
    own = worker._attachment._own  # type: ignore[union-attr]
    return [] if own is None else [state.version.counter for state in own.client.states]


def refusals(worker: Worker, job: Json) -> None:
    """Everything that a group refuses or reports; every rank goes on after each of them."""
    rank, plain = job["rank"], Mlp()
    params: list[Tensor] = list(plain.parameters())
    kept: Json = {}

    def note(name: str, act: Callable[[], object]) -> None:
        try:
            act()
        except Exception as error:
            kept[name] = (type(error).__name__, str(error), getattr(error, "__notes__", []))

    def gradients(through: nn.Module) -> None:
        plain.zero_grad()
        x, y, _ = dataset()
        begin = 8 * rank
        backward(loss_of(through, x[begin : begin + 8], y[begin : begin + 8]))

    other = Mlp(width=24 + rank)
    note("other models", lambda: worker.attach(other, optimizer_for(list(other.parameters()))))
    lone = Mlp()
    note("not its parameters", lambda: worker.attach(lone if rank else plain, optimizer_for(params)))
    optimizer = worker.attach(plain, optimizer_for(params))
    gradients(plain)
    note("unreduced", optimizer.step)
    model = DistributedDataParallel(plain)
    gradients(model)
    note("wrapped after attach", optimizer.step)
    worker.pull()
    gradients(model)
    with torch.no_grad():
        params[0].add_(rank)
    note("edited on rank 1", optimizer.step)
    worker.pull()
    gradients(model)
    for param in params:
        assert param.grad is not None
        param.grad[0] = float("nan")
    note("not finite", optimizer.step)
    note("pull on rank 0 only", worker.pull if rank == 0 else optimizer.step)
    if rank == 1:
        note("state on rank 1", optimizer.state_dict)
    gradients(model)
    optimizer.step()
    kept["steps"] = worker.global_step
    torch.save(kept, Path(job["folder"]) / f"{job['group']}.{rank}.pt")


def loops(worker: Worker, job: Json) -> None:
    """Accumulation, a loaded state dict, a schedule and a closure in a group."""
    model, plain = build(job)
    plain.register_buffer("offset", torch.full((3,), float(job["rank"])))
    params: list[Tensor] = list(plain.parameters())
    optimizer = worker.attach(model, optimizer_for(params), accumulate=3)
    scheduler = worker.schedule(StepLR(optimizer, 2, 0.5))
    torch.manual_seed(9)
    worker.load({**Mlp().state_dict(), "offset": torch.ones(3)} if job["rank"] == 0 else {})
    x, y, _ = dataset()
    for step in range(8):
        rows = slice(16 * step + 8 * job["rank"], 16 * step + 8 * job["rank"] + 8)
        optimizer.zero_grad()
        backward(loss_of(model, x[rows], y[rows]))
        optimizer.step()
        scheduler.step()
    worker.flush()
    after = {name: tensor.detach().clone() for name, tensor in plain.state_dict().items()}
    kept = {"after": after, "step": worker.global_step, "lr": scheduler.get_last_lr()}
    torch.save(kept, Path(job["folder"]) / f"{job['group']}.{job['rank']}.pt")


_SCRIPTS: dict[str, Callable[[Worker, Json], None]] = {"train": train, "refusals": refusals, "loops": loops}
