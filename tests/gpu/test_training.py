"""Workers with GPUs: the weights that come back equal, bit for bit, a CPU optimizer fed with the same gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import backward
from torch.nn.functional import mse_loss
from torch.optim import SGD, AdamW, Optimizer

from ps.alone import LocalJob, settings
from tests.gpu.shadow import Make, Shadow
from tests.support.cluster import ROOT, Local
from tests.support.models import Mlp, Strided, Tied, batches
from tests.support.nets import Attentive, Branching, Checkpointed, Parametrized
from workers import Worker
from workers.config import WorkerConfig

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

STEPS = 15


def adamw(params: Sequence[Tensor]) -> Optimizer:
    return AdamW(params, lr=0.01, weight_decay=0.1)


def sgd(params: Sequence[Tensor]) -> Optimizer:
    return SGD(params, lr=0.05, momentum=0.9, weight_decay=0.01)


def job() -> LocalJob:
    return LocalJob(servers=2, settings=settings(shard_bytes=256))


class Split(nn.Module):
    """Layers on several devices: the CPU, and every GPU there is."""

    def __init__(self) -> None:
        super().__init__()
        gpus = [torch.device("cuda", index) for index in range(torch.cuda.device_count())]
        self.devices = [gpus[0], torch.device("cpu"), *gpus, torch.device("cpu")]
        sizes = [7] + [16] * (len(self.devices) - 1) + [3]
        self.layers = nn.ModuleList(
            nn.Linear(before, after).to(device)
            for before, after, device in zip(sizes, sizes[1:], self.devices, strict=False)
        )

    def forward(self, x: Tensor) -> Tensor:
        """From device to device."""
        for layer, device in zip(self.layers, self.devices, strict=True):
            x = torch.tanh(layer(x.to(device)))
        return x


def plain(model: nn.Module, optimizer: Optimizer, device: torch.device) -> None:
    for x, y in batches(STEPS):
        optimizer.zero_grad()
        out = model(x.to(device))
        backward(mse_loss(out, y.to(out.device)))
        optimizer.step()


def in_place(model: nn.Module, optimizer: Optimizer, device: torch.device) -> None:
    """Gradients stay in the same memory, are clipped, and cleared right after the step."""
    for x, y in batches(STEPS):
        backward(mse_loss(model(x.to(device)), y.to(device)))
        nn.utils.clip_grad_norm_(model.parameters(), 0.3)
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)


def half(model: nn.Module, optimizer: Optimizer, device: torch.device) -> None:
    """float16 autocast with a GradScaler, inf steps too."""
    scaler = torch.amp.GradScaler("cuda", init_scale=1024.0)
    for step, (x, y) in enumerate(batches(STEPS)):
        optimizer.zero_grad()
        with torch.autocast("cuda", torch.float16):
            loss = mse_loss(model(x.to(device)).float(), y.to(device))
        backward(scaler.scale(loss * float("inf") if step % 5 == 2 else loss))
        scaler.step(optimizer)
        scaler.update()


def bfloat(model: nn.Module, optimizer: Optimizer, device: torch.device) -> None:
    for x, y in batches(STEPS):
        optimizer.zero_grad()
        with torch.autocast("cuda", torch.bfloat16):
            loss = mse_loss(model(x.to(device)).float(), y.to(device))
        backward(loss)
        optimizer.step()


CASES: dict[str, tuple[Callable[[], nn.Module], Make, Callable[[nn.Module, Optimizer, torch.device], None], int]] = {
    "adamw": (Mlp, adamw, plain, STEPS),
    "sgd": (Mlp, sgd, plain, STEPS),
    "wide": (partial(Mlp, 700), adamw, plain, STEPS),
    "in_place": (Mlp, sgd, in_place, STEPS),
    "strided": (Strided, sgd, plain, STEPS),
    "tied": (Tied, adamw, plain, STEPS),
    "branching": (Branching, adamw, plain, STEPS),
    "parametrized": (Parametrized, adamw, plain, STEPS),
    "attentive": (Attentive, sgd, plain, STEPS),
    "checkpointed": (Checkpointed, adamw, plain, STEPS),
    "float16": (Mlp, adamw, half, STEPS - 3),
    "bfloat16": (Mlp, adamw, bfloat, STEPS),
}


@pytest.mark.parametrize("name", CASES)
def test_a_gpu_worker_is_its_shadow(name: str) -> None:
    """One worker on a GPU, tensors split over shards and servers."""
    build, make, loop, steps = CASES[name]
    device = torch.device("cuda", torch.cuda.current_device())
    torch.manual_seed(5)
    model = build().to(device)
    with Worker(job().member(), WorkerConfig(message_bytes=2048)) as worker:
        optimizer = worker.attach(model, make(list(model.parameters())))
        shadow = Shadow(model, make)
        shadow.follow(model, optimizer)
        loop(model, optimizer, device)
        assert shadow.steps == steps == worker.global_step


def test_layers_on_several_devices() -> None:
    """Model parallel in one worker: CPU and GPUs by turns, messages that mix them."""
    torch.manual_seed(5)
    model = Split()
    for message_bytes in (256, 1 << 20):
        with Worker(job().member(), WorkerConfig(message_bytes=message_bytes)) as worker:
            optimizer = worker.attach(model, adamw(list(model.parameters())))
            shadow = Shadow(model, adamw)
            shadow.follow(model, optimizer)
            plain(model, optimizer, torch.device("cuda"))
            assert shadow.steps == STEPS


def test_cpu_and_gpu_workers_share_a_job() -> None:
    """By turns, on stale weights: both see the same weights after each step, equal to one CPU optimizer's."""
    shared = job()
    devices = [torch.device("cuda", torch.cuda.current_device()), torch.device("cpu")]
    torch.manual_seed(5)
    models = [Mlp().to(device) for device in devices]
    pair = [Worker(shared.member(), WorkerConfig()) for _ in devices]
    optimizers = [
        worker.attach(model, adamw(list(model.parameters()))) for worker, model in zip(pair, models, strict=True)
    ]
    shadow = Shadow(models[0], adamw)
    for model, optimizer in zip(models, optimizers, strict=True):
        shadow.follow(model, optimizer)
    for step, (x, y) in enumerate(batches(STEPS)):
        who = step * step % 3 % 2
        optimizers[who].zero_grad()
        backward(mse_loss(models[who](x.to(devices[who])), y.to(devices[who])))
        optimizers[who].step()
    for worker in pair:
        worker.close()
    assert shadow.steps == STEPS


def test_a_real_cluster_of_a_cpu_and_a_gpu_worker(tmp_path: Path) -> None:
    """Processes, RPC, pinned memory on the wire: the loss falls on both."""
    script = Path(__file__).with_name("train.py")
    with Local(script, tmp_path, servers=2, workers=2, env={"PYTHONPATH": str(ROOT)}) as local:
        assert local.wait() == 0, local.out + local.err
        final = local.summary()["final"]
    for device in ("cuda", "cpu"):
        assert final[f"last_loss_{device}"] < 0.5 * final[f"first_loss_{device}"]
