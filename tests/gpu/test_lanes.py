"""The copies between a GPU and the host: what they wait for, and what must not wait for them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from workers.lanes import CudaLane, lane_for

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

SIZE = 1 << 20


@pytest.fixture
def device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())


@pytest.fixture
def lane(device: torch.device) -> CudaLane:
    lane = lane_for(device)
    assert isinstance(lane, CudaLane)
    return lane


@pytest.fixture
def strict() -> Iterator[None]:
    """Any call that makes the host wait for the GPU is an error."""
    torch.cuda.synchronize()
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    yield
    torch.cuda.set_sync_debug_mode(before)


def busy(device: torch.device) -> torch.cuda.Event:
    """Queue some tenths of a second of work; returns its end."""
    big = torch.randn(8192, 8192, device=device)
    for _ in range(20):
        big = torch.tanh(big @ big)
    done = torch.cuda.Event()  # type: ignore[no-untyped-call]
    done.record()
    return done


def running(end: torch.cuda.Event) -> bool:
    """Whether work that ends there still runs."""
    return not end.query()  # type: ignore[no-untyped-call]


def buffers(device: torch.device) -> tuple[Tensor, Tensor]:
    """Pinned host memory, and flat memory on the device."""
    return torch.zeros(SIZE, dtype=torch.uint8, pin_memory=True), torch.zeros(SIZE, dtype=torch.uint8, device=device)


def test_gradients_may_change_as_soon_as_gather_is_back(device: torch.device, lane: CudaLane) -> None:
    """zero_grad and the next backward are queued behind the copy: the host gets the old values, time after time."""
    host, flat = buffers(device)
    view = flat.view(torch.float32)
    grad = torch.empty(SIZE // 4, device=device)
    for turn in range(50):
        grad.fill_(float(turn))
        lane.gather([(view, grad)], [(host, flat)])
        grad.fill_(-1.0)
        lane.ready()
        assert bool((host.view(torch.float32) == float(turn)).all()), turn


@pytest.mark.usefixtures("strict")
def test_gather_waits_for_nothing_on_the_host(device: torch.device, lane: CudaLane) -> None:
    """It is back while the work that makes the gradient still runs; `ready` waits for it."""
    host, flat = buffers(device)
    grad = torch.empty(SIZE // 4, device=device)
    done = busy(device)
    grad.fill_(3.0)
    lane.gather([(flat.view(torch.float32), grad)], [(host, flat)])
    assert running(done)
    lane.ready()
    assert not running(done)
    assert bool((host.view(torch.float32) == 3.0).all())


@pytest.mark.usefixtures("strict")
def test_weights_arrive_behind_earlier_work_and_before_later(device: torch.device, lane: CudaLane) -> None:
    """What is queued still reads the old weights, what comes after reads the new ones; the host waits for neither."""
    weight, old, new = (torch.ones(SIZE // 4, device=device) for _ in range(3))
    arrived = torch.full((SIZE // 4,), 2.0).view(torch.uint8)
    lane.bring(arrived)  # the first allocation of memory may make the host wait
    done = busy(device)
    old.copy_(weight)
    payload = lane.bring(arrived)
    arrived.zero_()  # the payload may go at once
    lane.scatter([(weight, payload.view(torch.float32))])
    new.copy_(weight)
    assert running(done)
    torch.cuda.set_sync_debug_mode("default")
    assert bool((old == 1.0).all()) and bool((new == 2.0).all())


def test_brought_memory_is_not_reused_too_early(device: torch.device, lane: CudaLane) -> None:
    """Many replies in a row, each dropped right after its copies are queued: none takes another's memory."""
    weights = [torch.zeros(SIZE // 4, device=device) for _ in range(64)]
    busy(device)
    for value, weight in enumerate(weights):
        payload = lane.bring(torch.full((SIZE // 4,), float(value)).view(torch.uint8))
        lane.scatter([(weight, payload.view(torch.float32))])
        del payload
    assert all(bool((weight == float(value)).all()) for value, weight in enumerate(weights))
