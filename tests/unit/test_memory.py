"""Freed memory stays with the process that asked for it."""

from __future__ import annotations

import asyncio
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


# Fills and frees what a burst would, then idles; says by how many MiB the process shrinks, and whether it did
# meanwhile.
GIVES_BACK = """
import asyncio
from iris.memory import give_back_when_idle, keep_freed_memory, resident_bytes

async def main():
    assert keep_freed_memory()
    giving = asyncio.create_task(give_back_when_idle(idle_s=0.2))
    burst = [b"x" * (64 << 10) for _ in range(3200)]
    del burst
    full = resident_bytes()
    for _ in range(100):
        await asyncio.sleep(0.1)
        if full - resident_bytes() > 150 << 20:
            break
    giving.cancel()
    print((full - resident_bytes()) >> 20)

asyncio.run(main())
"""


@on_glibc
def test_an_idle_process_gives_back_what_it_kept_of_a_burst() -> None:
    command = [sys.executable, "-c", GIVES_BACK]
    run = subprocess.run(command, check=True, capture_output=True, text=True)
    assert int(run.stdout) > 150


async def test_where_the_c_library_is_not_glibc_nothing_is_given_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ctypes, "CDLL", lambda name: object())
    await asyncio.wait_for(memory.give_back_when_idle(), 5)


def test_nothing_is_promised_where_the_c_library_is_not_glibc(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ctypes, "CDLL", lambda name: object())
    assert memory.keep_freed_memory() is False
