"""Two whole clusters started at the same moment on one machine."""

from __future__ import annotations

from pathlib import Path

from tests.support import train
from tests.support.cluster import Local

SCRIPT = Path(train.__file__)


def test_two_cold_starts(tmp_path: Path) -> None:
    """Both finish, each with its own members, samples and ports: no port and no name is fixed."""
    one, two = tmp_path / "one", tmp_path / "two"
    with Local(SCRIPT, one, arguments=[str(one)]) as first, Local(SCRIPT, two, arguments=[str(two)]) as second:
        assert first.address() != second.address()
        assert (first.wait(), second.wait()) == (0, 0), first.out + second.out
    for folder, local in ((one, first), (two, second)):
        assert local.summary()["workers_seen"] == 1 and local.summary()["samples"] == 400
        assert set(train.seen(folder)[0].values()) == {1}
