"""Freed memory stays with the process that asked for it."""

from __future__ import annotations

import asyncio
import ctypes
import platform
import subprocess
import sys

import pytest

from iris import memory
from iris.memory import COLLECT_S, LATEST_S, WORTH_BYTES, Tidier, tidy

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
from iris.memory import keep_freed_memory, resident_bytes, tidy

async def main():
    assert keep_freed_memory()
    giving = asyncio.create_task(tidy(idle_s=0.2))
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


GIB = 1 << 30


def test_an_idle_process_collects_cycles_at_most_once_an_hour() -> None:
    tidier = Tidier(0.0, 0)
    assert not tidier.collects(COLLECT_S - 1, 0, idle=True)
    assert not tidier.collects(COLLECT_S, 0, idle=False)
    assert tidier.collects(COLLECT_S, 0, idle=True)
    tidier.collected(COLLECT_S, 0)
    assert not tidier.collects(2 * COLLECT_S - 1, 0, idle=True)


def test_a_process_that_is_never_idle_collects_cycles_once_a_day_or_when_it_has_grown_very_much() -> (
    None
):
    tidier = Tidier(0.0, GIB)
    assert not tidier.collects(LATEST_S - 1, 2 * GIB, idle=False)
    assert tidier.collects(LATEST_S, GIB, idle=False)
    assert tidier.collects(1.0, 2 * GIB + 1, idle=False)
    tidier.collected(1.0, 2 * GIB)
    tidier.returned(0)
    assert not tidier.collects(2.0, 3 * GIB, idle=False)  # it has been as large before


def test_memory_is_returned_when_a_process_is_idle_and_has_grown_since_the_last_time() -> None:
    tidier = Tidier(0.0, 0)
    assert not tidier.returns(WORTH_BYTES, idle=True)
    assert not tidier.returns(WORTH_BYTES + 1, idle=False)
    assert tidier.returns(WORTH_BYTES + 1, idle=True)
    tidier.returned(WORTH_BYTES)
    assert not tidier.returns(2 * WORTH_BYTES, idle=True)


@pytest.mark.parametrize("shows", [True, False])
async def test_cycles_are_collected_whatever_the_c_library_is(
    shows: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without glibc nothing is returned, and without /proc no size is known."""

    def unknown() -> int:
        raise OSError

    collected = asyncio.Event()
    monkeypatch.setattr(ctypes, "CDLL", lambda name: object())
    monkeypatch.setattr(memory, "COLLECT_S", 0.0)
    monkeypatch.setattr(memory, "IDLE_SHARE", 2.0)
    monkeypatch.setattr(memory.gc, "collect", collected.set)  # type: ignore[attr-defined]  # it is the module's
    if not shows:
        monkeypatch.setattr(memory, "resident_bytes", unknown)
    tidying = asyncio.create_task(tidy(idle_s=0.01))
    await asyncio.wait_for(collected.wait(), 10)
    assert not tidying.done()
    tidying.cancel()


# Keeps a million lists in a process that collects seldom, and fails if a collection begins.
COLLECTS = """
import gc
from iris.memory import collect_seldom

seen = []
gc.callbacks.append(lambda phase, info: seen.append(info))
collect_seldom()
seen.clear()
kept = [[[]] for _ in range(1_000_000)]
assert not seen, seen
print("none")
"""


def test_no_collection_begins_because_much_is_allocated() -> None:
    run = subprocess.run(
        [sys.executable, "-c", COLLECTS], check=True, capture_output=True, text=True
    )
    assert run.stdout == "none\n"


def test_nothing_is_promised_where_the_c_library_is_not_glibc(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ctypes, "CDLL", lambda name: object())
    assert memory.keep_freed_memory() is False
