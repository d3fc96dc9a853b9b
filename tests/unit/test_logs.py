"""Log lines: who said it, and only on change."""

from __future__ import annotations

import io
import logging
from collections.abc import Iterator

import pytest

from ps import logs


@pytest.fixture
def stream() -> Iterator[io.StringIO]:
    """Where `ps` loggers write; put back as they were afterwards."""
    loggers = [logging.getLogger(name) for name in ("ps", "workers")]
    before = [(list(logger.handlers), logger.level, logger.propagate) for logger in loggers]
    output = io.StringIO()
    logs.setup(who="server-0", stream=output)
    yield output
    for logger, (handlers, level, propagate) in zip(loggers, before, strict=True):
        logger.handlers[:], logger.propagate = handlers, propagate
        logger.setLevel(level)


def test_lines_say_who(stream: io.StringIO) -> None:
    """Each line names the process, by the newest name it has."""
    log = logging.getLogger("ps.somewhere")
    log.info("one")
    logs.identify("server-0#7")
    log.info("two")
    assert "[server-0] one" in stream.getvalue()
    assert "[server-0#7] two" in stream.getvalue()


def test_setup_again_does_not_double_lines(stream: io.StringIO) -> None:
    """A second `setup` replaces the first."""
    logs.setup(who="server-0", stream=stream)
    logging.getLogger("workers.x").info("once")
    assert stream.getvalue().count("once") == 1


def test_on_change(stream: io.StringIO) -> None:
    """A message is logged when it differs from the one before, and only then."""
    say = logs.OnChange(logging.getLogger("ps.x"))
    assert [say("waiting"), say("waiting"), say("running"), say("waiting")] == [True, False, True, True]
    assert stream.getvalue().count("waiting") == 2
