"""What a process with large, short-lived buffers wants of the C allocator: to keep freed memory, and to give it back once idle."""

from __future__ import annotations

import asyncio
import ctypes
import os
import time
from pathlib import Path
from typing import Final

# <malloc.h>, stable since glibc 2.0
_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3

_MIB = 1 << 20
_TRIM_BYTES = 512 * _MIB
# glibc before 2.35 refuses an mmap threshold over half a heap, which is 32 MiB.
_MMAP_BYTES = (64 * _MIB, 32 * _MIB)


def keep_freed_memory() -> bool:
    """Have the allocator keep up to 512 MiB that was freed, for this process and until it ends.

    By default glibc returns what was freed at the top of its heap, and large buffers at once, to the
    kernel, which then clears every page of the next bundle. docs/decisions/0002 has the figures.

    Returns False, with nothing promised, where the C library is not glibc or refuses.
    """
    try:
        libc = ctypes.CDLL(None)
        _ = libc.gnu_get_libc_version  # musl has no mallopt, and others have one that does nothing
        mallopt = libc.mallopt
    except (AttributeError, OSError, TypeError):  # TypeError: CDLL(None) on Windows
        return False
    libc.malloc_trim(0)  # return what imports left behind
    mallopt.argtypes = (ctypes.c_int, ctypes.c_int)
    mallopt.restype = ctypes.c_int
    mapped = any(mallopt(_M_MMAP_THRESHOLD, size_bytes) == 1 for size_bytes in _MMAP_BYTES)
    trimmed = bool(mallopt(_M_TRIM_THRESHOLD, _TRIM_BYTES) == 1)
    return mapped and trimmed


IDLE_S: Final = 0.5
IDLE_SHARE: Final = 0.02
"""Of a processor: a process that used less for `IDLE_S` is idle."""
WORTH_BYTES: Final = 32 * _MIB
"""Memory is given back when so much more is resident than after the last time."""


async def give_back_when_idle(*, idle_s: float = IDLE_S) -> None:
    """After a burst, return what the allocator kept of it to the system as soon as the process is idle. Runs until cancelled.

    Does nothing, for good, where `keep_freed_memory` does nothing or the system does not say what is resident.
    """
    try:
        trim = ctypes.CDLL(None).malloc_trim
        resident_bytes()
    except (AttributeError, OSError, TypeError):
        return
    kept = 0
    used_s = time.process_time()
    while True:
        await asyncio.sleep(idle_s)
        before_s, used_s = used_s, time.process_time()
        if used_s - before_s < IDLE_SHARE * idle_s and resident_bytes() > kept + WORTH_BYTES:
            trim(0)
            kept = resident_bytes()
            used_s = time.process_time()


def resident_bytes() -> int:
    """Return how much memory of this process is resident. Raises OSError where /proc is missing."""
    pages = Path("/proc/self/statm").read_text().split()[1]
    return int(pages) * os.sysconf("SC_PAGE_SIZE")
