"""What can't be served is refused by name, with what to do about it."""

from __future__ import annotations

import re

import pytest

from ps.alone import LocalJob
from tests.numerics.compare import Record
from tests.numerics.refused import REFUSED
from workers import Worker
from workers.config import WorkerConfig


@pytest.mark.parametrize("name", REFUSED)
def test_refused_by_name(name: str, record_property: Record) -> None:
    """A clear error names the thing; none of it comes from deep inside."""
    case = REFUSED[name]
    with Worker(LocalJob().member(), WorkerConfig()) as worker:
        with pytest.raises(case.error, match=re.escape(case.words)) as caught:
            case.act(worker)
        assert type(caught.value) is case.error
        record_property("refused", (name, str(caught.value)))
