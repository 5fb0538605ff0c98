"""Freed memory stays with the process that asked for it."""

from __future__ import annotations

import ctypes
import platform
import subprocess
import sys

import pytest

from iris import memory

# Says by how many MiB the process shrinks when a touched buffer of 24 MiB is freed.
SHRINKS_MIB = """
import os, sys
from iris.memory import keep_freed_memory

def resident_bytes():
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

if sys.argv[1] == "keep":
    assert keep_freed_memory()
buffer = b"x" * (24 << 20)
full = resident_bytes()
del buffer
print((full - resident_bytes()) >> 20)
"""

on_glibc = pytest.mark.skipif(
    platform.libc_ver()[0] != "glibc", reason="the C library is not glibc"
)


def shrinks_mib(what: str) -> int:
    run = subprocess.run(
        [sys.executable, "-c", SHRINKS_MIB, what], check=True, capture_output=True, text=True
    )
    return int(run.stdout)


@on_glibc
def test_a_freed_buffer_is_kept_for_the_next_one() -> None:
    assert shrinks_mib("keep") < 2


@on_glibc
def test_without_the_call_a_freed_buffer_goes_back_to_the_kernel() -> None:
    assert shrinks_mib("default") >= 22


def test_nothing_is_promised_where_the_c_library_is_not_glibc(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ctypes, "CDLL", lambda name: object())
    assert memory.keep_freed_memory() is False
