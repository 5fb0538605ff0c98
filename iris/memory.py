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


def collect_seldom() -> None:
    """Let no collection of cycles begin by itself in this process, and never look at the objects that it has now.

    A full collection looks at all objects, and nothing else runs meanwhile: 0.3 s with three million of them. One of
    the young objects may take 50 ms: Python begins it when more were made than freed, and where many end while others
    begin, a hundred thousand come together first. What others make a process hold must not decide about that. `tidy`
    collects instead.
    """
    gc.collect()
    gc.freeze()
    gc.disable()


IDLE_S: Final = 0.5
"""Period over which idleness is measured."""
IDLE_SHARE: Final = 0.02
"""A process is idle if it used less than this share of one CPU for `IDLE_S`."""
WORTH_BYTES: Final = 32 * _MIB
"""Memory is returned if the resident size has grown by this much since the last time."""
COLLECT_S: Final = 3600.0
"""An idle process collects cycles at most this often."""
LATEST_S: Final = 24 * COLLECT_S
"""One that is never idle collects them this often."""
SUSPECT_BYTES: Final = 1 << 30
"""So does one that has grown by this much since the last time: a library might leave that many cycles."""


class Tidier:
    """When one process collects cycles, and when it returns freed memory. `now_s` is a monotonic clock.

    What ends is freed as its last reference goes; the tests of the relay hold it to that. So a collection only finds
    what a library left, it may wait until nobody does, and returning memory does not need it.
    """

    def __init__(self, now_s: float, resident: int) -> None:
        self._collected_s = now_s
        self._collected_bytes = resident
        self._returned_bytes = 0

    def collects(self, now_s: float, resident: int, *, idle: bool) -> bool:
        """Return whether a full collection is due."""
        waited_s = now_s - self._collected_s
        return (
            (idle and waited_s >= COLLECT_S)
            or waited_s >= LATEST_S
            or resident > self._collected_bytes + SUSPECT_BYTES
        )

    def collected(self, now_s: float, resident: int) -> None:
        """Note a full collection."""
        self._collected_s, self._collected_bytes = now_s, resident

    def returns(self, resident: int, *, idle: bool) -> bool:
        """Return whether it is worth while to return freed memory."""
        return idle and resident > self._returned_bytes + WORTH_BYTES

    def returned(self, resident: int) -> None:
        """Note that freed memory was returned."""
        self._returned_bytes = resident


async def tidy(*, idle_s: float = IDLE_S) -> None:
    """Return freed memory whenever the process becomes idle after a burst, and collect cycles seldom. Runs until
    cancelled.

    Memory is not returned if the C library is not glibc, or the system does not show the resident size.
    """
    try:
        trim = ctypes.CDLL(None).malloc_trim
    except (AttributeError, OSError, TypeError):
        trim = None
    tidier = Tidier(time.monotonic(), _resident_or_none())
    used_s = time.process_time()
    while True:
        await asyncio.sleep(idle_s)
        before_s, used_s = used_s, time.process_time()
        idle = used_s - before_s < IDLE_SHARE * idle_s
        resident = _resident_or_none()
        if tidier.collects(time.monotonic(), resident, idle=idle):
            gc.collect()
            resident = _resident_or_none()
            tidier.collected(time.monotonic(), resident)
        if trim is not None and tidier.returns(resident, idle=idle):
            trim(0)
            tidier.returned(_resident_or_none())
        used_s = time.process_time()


def _resident_or_none() -> int:
    """Return the resident size of this process in bytes; 0 if the system does not show it."""
    try:
        return resident_bytes()
    except OSError:
        return 0


def resident_bytes() -> int:
    """Return the resident size of this process in bytes. Raises OSError if there is no /proc."""
    pages = Path("/proc/self/statm").read_text().split()[1]
    return int(pages) * os.sysconf("SC_PAGE_SIZE")
