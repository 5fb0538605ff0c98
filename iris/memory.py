"""Memory of whole processes: the C allocator keeps what is freed, the collector of cycles runs seldom, and an idle
process gives memory back.
"""

from __future__ import annotations

import asyncio
import ctypes
import gc
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
    """Make the allocator keep up to 512 MiB of freed memory, for this whole process until it ends.

    By default glibc returns large buffers, and free memory at the top of its heap, to the kernel at once. The kernel
    then has to clear every page of the next bundle. docs/decisions/0002 has the figures.

    Return False if the C library is not glibc or refuses; it may then have applied a part of it.
    """
    try:
        libc = ctypes.CDLL(None)
        _ = libc.gnu_get_libc_version  # musl lacks mallopt, and some others have one without effect
        mallopt = libc.mallopt
    except (AttributeError, OSError, TypeError):  # TypeError: CDLL(None) on Windows
        return False
    libc.malloc_trim(0)  # return what imports have freed
    mallopt.argtypes = (ctypes.c_int, ctypes.c_int)
    mallopt.restype = ctypes.c_int
    mapped = any(mallopt(_M_MMAP_THRESHOLD, size_bytes) == 1 for size_bytes in _MMAP_BYTES)
    trimmed = bool(mallopt(_M_TRIM_THRESHOLD, _TRIM_BYTES) == 1)
    return mapped and trimmed


FULL_COLLECTION: Final = 200
"""Full collections begin after this many of the middle generation. By default 10."""


def collect_seldom() -> None:
    """Collect cycles of old objects seldom in this process, and never look at the objects that it has now.

    A full collection looks at all objects, and nothing else runs meanwhile. What others make a process hold must not
    decide how often that happens. Cycles are collected once the process is idle.
    """
    gc.collect()
    gc.freeze()
    young, middle, _ = gc.get_threshold()
    gc.set_threshold(young, middle, FULL_COLLECTION)


IDLE_S: Final = 0.5
"""Period over which idleness is measured."""
IDLE_SHARE: Final = 0.02
"""A process is idle if it used less than this share of one CPU for `IDLE_S`."""
WORTH_BYTES: Final = 32 * _MIB
"""Memory is returned if the resident size has grown by this much since the last time."""


async def give_back_when_idle(*, idle_s: float = IDLE_S) -> None:
    """Collect cycles and return freed memory whenever the process becomes idle after a burst. Runs until cancelled.

    Returns at once if the C library is not glibc, or the system does not show the resident size.
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
            gc.collect()
            trim(0)
            kept = resident_bytes()
            used_s = time.process_time()


def resident_bytes() -> int:
    """Return the resident size of this process in bytes. Raises OSError if there is no /proc."""
    pages = Path("/proc/self/statm").read_text().split()[1]
    return int(pages) * os.sysconf("SC_PAGE_SIZE")
