"""What the kernel knows of the clock: adjtimex(2), which a time service such as chrony keeps up to date."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Sequence
from typing import Any, ClassVar, Final, NamedTuple

_ERROR: Final = 5  # TIME_ERROR
_UNSYNCHRONIZED: Final = 0x40
_NANOSECONDS: Final = 0x2000
_LONG: Final = ctypes.c_long


class Clock(NamedTuple):
    """The state of the clock, in seconds."""

    synchronized: bool
    offset_s: float
    max_error_s: float


class _Timex(ctypes.Structure):
    _fields_: ClassVar[Sequence[tuple[str, Any]]] = [  # type: ignore[mutable-override]  # as ctypes wants it
        ("modes", ctypes.c_uint), ("offset", _LONG), ("freq", _LONG), ("maxerror", _LONG), ("esterror", _LONG),
        ("status", ctypes.c_int), ("constant", _LONG), ("precision", _LONG), ("tolerance", _LONG), ("seconds", _LONG),
        ("micros", _LONG), ("tick", _LONG), ("ppsfreq", _LONG), ("jitter", _LONG), ("shift", ctypes.c_int),
        ("stabil", _LONG), ("jitcnt", _LONG), ("calcnt", _LONG), ("errcnt", _LONG), ("stbcnt", _LONG),
        ("tai", ctypes.c_int), ("reserved", ctypes.c_int * 11),
    ]  # fmt: skip


def read() -> Clock | None:
    """Return the state of the clock; None where the system does not know it."""
    if sys.platform != "linux":
        return None
    timex = _Timex()  # modes = 0: read, set nothing
    state = ctypes.CDLL(None, use_errno=True).adjtimex(ctypes.byref(timex))
    if state < 0:
        return None
    unit = 1e-9 if timex.status & _NANOSECONDS else 1e-6
    synchronized = state != _ERROR and not timex.status & _UNSYNCHRONIZED
    return Clock(synchronized, timex.offset * unit, timex.maxerror * 1e-6)
