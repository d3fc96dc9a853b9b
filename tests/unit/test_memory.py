"""Memory settings: what is added to an environment, and when a process starts itself again."""

from __future__ import annotations

import os
from collections.abc import Mapping

import pytest

from ps import memory
from ps.errors import ConfigError

GLIBC = memory.is_glibc()
needs_glibc = pytest.mark.skipif(not GLIBC, reason="the settings are glibc's")


@needs_glibc
def test_settings_on_an_empty_environment() -> None:
    """Huge pages, and a heap that maps nothing and keeps what was freed."""
    assert memory.settings({}) == {
        "THP_MEM_ALLOC_ENABLE": "1",
        "GLIBC_TUNABLES": "glibc.malloc.mmap_max=0:glibc.malloc.trim_threshold=4294967296",
    }


@needs_glibc
def test_what_the_user_has_set_stays() -> None:
    """Entries of the user's are kept, ours are added to them, and a second look finds nothing to add."""
    mine = {"THP_MEM_ALLOC_ENABLE": "0", "GLIBC_TUNABLES": "glibc.malloc.mmap_max=9:glibc.rtld.nns=2"}
    added = memory.settings(mine)
    assert added == {
        "GLIBC_TUNABLES": "glibc.malloc.mmap_max=9:glibc.rtld.nns=2:glibc.malloc.trim_threshold=4294967296"
    }
    assert memory.settings({**mine, **added}) == {}


def test_other_allocators_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is set where glibc's malloc is not the one in use."""
    assert memory.settings({"LD_PRELOAD": "/usr/lib/libjemalloc.so.2"}) == {}
    monkeypatch.setattr(memory, "is_glibc", lambda: False)
    assert memory.settings({}) == {}


class _Replaced(Exception):
    """Stands for the process having been replaced."""


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[Mapping[str, str]]:
    """Environments with which the process would have been started again."""
    seen: list[Mapping[str, str]] = []

    def execve(path: str, arguments: list[str], env: Mapping[str, str]) -> None:
        seen.append(env)
        raise _Replaced

    monkeypatch.setattr(os, "execve", execve)
    monkeypatch.setattr(memory, "is_glibc", lambda: True)
    monkeypatch.delitem(__import__("sys").modules, "torch", raising=False)
    return seen


def test_restart_once(started: list[Mapping[str, str]]) -> None:
    """A process without the settings starts again with them; with them it goes on."""
    with pytest.raises(_Replaced):
        memory.restart_with_settings({"HOME": "/root"})
    assert started[0]["HOME"] == "/root" and started[0]["THP_MEM_ALLOC_ENABLE"] == "1"
    memory.restart_with_settings(started[0])
    assert len(started) == 1


def test_restart_can_be_switched_off(started: list[Mapping[str, str]]) -> None:
    """PS_KEEP_ENVIRONMENT=1: the process stays as it was started."""
    memory.restart_with_settings({"PS_KEEP_ENVIRONMENT": "1"})
    assert started == []


def test_too_late_once_torch_is_there(started: list[Mapping[str, str]], monkeypatch: pytest.MonkeyPatch) -> None:
    """After torch is imported its allocator has read the environment: said instead of done in vain."""
    monkeypatch.setitem(__import__("sys").modules, "torch", memory)
    with pytest.raises(ConfigError, match="before torch is imported"):
        memory.restart_with_settings({})
