"""How a script ends that holds its worker without a `with` block."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest

from workers.exits import Exits


@pytest.fixture
def exits() -> Iterator[Exits]:
    exits = Exits()
    exits.install()
    yield exits
    exits.restore()


def test_an_exit_that_is_caught_is_forgotten(exits: Exits) -> None:
    """In the function itself, or further up."""
    with pytest.raises(SystemExit) as caught:
        sys.exit(3)
    assert caught.value.code == 3
    del caught
    assert exits.error is None


def test_sys_exit_is_put_back(exits: Exits) -> None:
    """As it was; somebody else's replacement is left alone."""
    exits.restore()
    real = sys.exit
    assert not isinstance(getattr(real, "__self__", None), Exits)
    exits.install()
    assert sys.exit != real
    exits.restore()
    assert sys.exit is real
