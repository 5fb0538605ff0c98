"""Core dumps: a file, or the input of a crash handler, that would hold the keys of the process.

Only programs of Iris forbid them, each at its start. The library never does: the process belongs to somebody else.
"""

from __future__ import annotations

import resource
from typing import Final

_NOWHERE: Final = 1
"""Linux writes no file that is shorter than a page, and starts no handler (`core_pattern` with a pipe) for a process
whose limit is exactly one byte: see `do_coredump` in fs/coredump.c. With the limit 0 it starts the handler."""
_PR_SET_DUMPABLE: Final = 4


def forbid() -> None:
    """Let this process leave no core dump, nor any process that it starts, unless that one raises its soft limit again.

    Debuggers of the same user can still attach, and /proc/PID stays that user's, as it would not with PR_SET_DUMPABLE.
    So this is used only if the hard limit is 0 and may not be raised; a process that is started then is not covered.

    Raises:
        OSError: the system allows neither.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_CORE)
    if soft == _NOWHERE:
        return
    try:
        resource.setrlimit(resource.RLIMIT_CORE, (_NOWHERE, hard or _NOWHERE))
    except (ValueError, OSError):
        import ctypes

        libc = ctypes.CDLL(None, use_errno=True)
        if libc.prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0):
            raise OSError(ctypes.get_errno(), "cannot forbid core dumps") from None
