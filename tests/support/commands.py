"""Command lines found in files, parsed by `psctl`'s own parser and turned into settings, without running anything."""

from __future__ import annotations

import argparse
import contextlib
import io
from collections.abc import Mapping, Sequence
from dataclasses import fields
from unittest import mock

import pytest

from ps import cli
from ps.config import CoordinatorConfig
from workers.cli import build_parser


def parse(arguments: Sequence[str], environment: Mapping[str, str] | None = None) -> argparse.Namespace:
    """The options of a call of `psctl`, with the settings checked that its command makes of them; fails the test when
    psctl would refuse them. `environment` stands for the process's `PS_*` variables."""
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            options = build_parser().parse_args([str(argument) for argument in arguments])
    except SystemExit:
        pytest.fail(f"psctl {' '.join(arguments)}: {said.getvalue()}", pytrace=False)
    if arguments[0] == "coordinator":
        CoordinatorConfig(**{field.name: getattr(options, field.name) for field in fields(CoordinatorConfig)})
    if hasattr(options, "join_timeout_s") and (options.coordinator or environment):
        with mock.patch.object(cli, "environment", lambda: environment or {}):
            options.coordinator = str(cli.member_config(options).coordinator)
    return options
