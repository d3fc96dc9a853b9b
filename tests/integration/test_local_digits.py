"""`psctl local` trains the digits example on real processes: accuracy, run folder, and each sample once per epoch."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from safetensors.torch import load_file

from tests.support import train
from tests.support.cluster import DIGITS, ROOT, Local, clean_environment

DEAD_PROXY = "http://127.0.0.1:1"
PROXIES = {
    name: DEAD_PROXY
    for lower in ("http_proxy", "https_proxy", "grpc_proxy", "all_proxy")
    for name in (lower, lower.upper())
}


def digits_module() -> ModuleType:
    """examples/digits.py as a module."""
    spec = importlib.util.spec_from_file_location("digits", DIGITS)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(("servers", "workers"), [(1, 1), (2, 2), (1, 3)])
def test_digits(tmp_path: Path, servers: int, workers: int) -> None:
    """The accuracy is reached and reported, the summary is whole, and the exported file is the trained model.

    All proxy variables point to a dead address meanwhile: nothing goes through them.
    """
    with Local(DIGITS, tmp_path, servers=servers, workers=workers, env=PROXIES) as local:
        assert local.wait() == 0, local.out + local.err
    assert local.err == ""
    assert not re.search(r"warning|deprecated", local.out, re.IGNORECASE), local.out
    summary = local.summary()
    assert summary["outcome"] == "finished"
    assert summary["final"]["test_accuracy"] >= 0.97
    assert summary["samples"] == 12 * 1437
    assert summary["workers_seen"] == workers
    assert summary["pushes"] >= 12 * 1437 // 32 and summary["pulls"] > 0
    assert summary["bytes_pushed"] > 0 and summary["bytes_pulled"] > 0
    assert summary["seconds"] > 0 and summary["samples_per_s"] > 0
    assert set(summary["staleness"]) == {"mean", "max", "histogram"}
    assert (summary["staleness"]["max"] == 0) is (workers == 1)
    names = {path.stem for path in (local.run_dir / "logs").iterdir()}
    wanted = {
        "coordinator",
        "export",
        *(f"server-{n}" for n in range(servers)),
        *(f"worker-{n}" for n in range(workers)),
    }
    assert names == wanted
    check_model(local)


def check_model(local: Local) -> None:
    """model.safetensors loads into the plain model, which then is as good as was reported."""
    digits = digits_module()
    model = digits.build()
    model.load_state_dict(load_file(local.run_dir / "model.safetensors"))
    _, (test_x, test_y) = digits.digits(0)
    assert digits.evaluate(model, test_x, test_y) >= 0.97
    # the script prints what it has measured; the last of them had the final weights
    shown = [float(found) for found in re.findall(r"test accuracy ([0-9.]+)", local.out)]
    assert min(abs(digits.evaluate(model, test_x, test_y) - value) for value in shown) < 1e-3


def test_digits_alone() -> None:
    """Without a coordinator the same script trains in one process, with the result of plain PyTorch."""
    result = subprocess.run(
        [sys.executable, str(DIGITS), "--epochs=2"], cwd=ROOT, env=clean_environment(), capture_output=True, text=True,
        timeout=60,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    found = re.search(r"test accuracy ([0-9.]+)", result.stdout)
    assert found is not None
    assert abs(float(found[1]) - plain_digits(2)) < 0.01


def plain_digits(epochs: int) -> float:
    """The example's loop in plain PyTorch, over the same batches."""
    import workers

    digits = digits_module()
    torch.manual_seed(0)
    (x, y), (test_x, test_y) = digits.digits(0)
    model = digits.build()
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3)
    for epoch in range(epochs):
        digits.set_lr(optimizer, 4e-3, epoch / epochs)
        order = workers.permutation(0, epoch, len(x))
        for batch in batches(order, 32):
            optimizer.zero_grad()
            loss: torch.Tensor = torch.nn.functional.cross_entropy(model(x[batch]), y[batch])
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
    return float(digits.evaluate(model, test_x, test_y))


def batches(order: torch.Tensor, size: int) -> list[torch.Tensor]:
    """Batches of `size`; a rest of less than half of it is merged into the last one."""
    cut = list(order.split(size))  # type: ignore[no-untyped-call]
    if len(cut) > 1 and len(cut[-1]) * 2 < size:
        cut[-2:] = [torch.cat(cut[-2:])]
    return cut


def test_each_sample_once_per_epoch(tmp_path: Path) -> None:
    """Three workers share two epochs of 403 samples: each sample is pushed exactly once in each; status agrees."""
    script = Path(train.__file__)
    with Local(
        script, tmp_path, servers=2, workers=3, arguments=[str(tmp_path), "--samples=403", "--epochs=2"]
    ) as local:
        assert local.wait() == 0, local.out + local.err
    counts = train.seen(tmp_path)
    assert set(counts) == {0, 1}
    for epoch in (0, 1):
        assert set(counts[epoch]) == set(range(403)) and set(counts[epoch].values()) == {1}
    assert local.summary()["samples"] == 2 * 403
    assert local.summary()["outcome"] == "finished"
