"""Names of consistency choices."""

from __future__ import annotations

import re

import pytest

from ps.config import parse_consistency
from ps.consistency.asp import Asp
from ps.consistency.bsp import Bsp
from ps.consistency.parse import choice
from ps.consistency.policy import Policy
from ps.consistency.ssp import Ssp
from ps.errors import ConfigError


@pytest.mark.parametrize(
    ("name", "parsed", "kind"), [("asp", ("asp", 0), Asp), ("bsp", ("bsp", 0), Bsp), ("ssp:12", ("ssp", 12), Ssp)]
)
def test_names_that_mean_something(name: str, parsed: tuple[str, int], kind: type[Policy]) -> None:
    """Each makes a policy of its own for each shard."""
    assert parse_consistency(name) == parsed
    made = choice(name)
    assert isinstance(made.make(), kind)
    assert made.make() is not made.make()
    assert (made.first is None) == (name == "asp")


@pytest.mark.parametrize("name", ["", "ssp", "ssp:-1", "ssp:1.5", "bsp:2", "asp:1", "BSP"])
def test_others_are_refused_by_name(name: str) -> None:
    """With the choices there are."""
    with pytest.raises(ConfigError, match=re.escape(f"--consistency {name!r} is not available; choose one of: asp")):
        parse_consistency(name)


def test_first_clocks() -> None:
    """bsp: the first round that is open nowhere. ssp: beside the slowest."""
    bsp, ssp = choice("bsp").first, choice("ssp:2").first
    assert bsp is not None and ssp is not None
    assert (bsp([3, 5, 4]), ssp([3, 5, 4])) == (5, 3)
    assert (bsp([]), ssp([])) == (0, 0)
