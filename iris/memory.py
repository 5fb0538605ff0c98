"""One setting of the C allocator that a process with large, short-lived buffers wants."""

from __future__ import annotations

import ctypes

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
    mallopt.argtypes = (ctypes.c_int, ctypes.c_int)
    mallopt.restype = ctypes.c_int
    mapped = any(mallopt(_M_MMAP_THRESHOLD, size_bytes) == 1 for size_bytes in _MMAP_BYTES)
    trimmed = bool(mallopt(_M_TRIM_THRESHOLD, _TRIM_BYTES) == 1)
    return mapped and trimmed
