"""Calls that handlers make while their relay stops.

A relay that stops waits for the handlers that run at its sessions. So what they call must not wait for the next relay:
it goes through the session that is being left (`Attachment.ready`), which does not end before these handlers have.
The handlers may use another client than the one that serves them, so all clients of the process are looked at.
"""

from __future__ import annotations

import asyncio
import os
import weakref
from contextvars import ContextVar
from typing import Final

from iris.core.session import Session

IN_HANDLER: Final[ContextVar[asyncio.AbstractEventLoop | None]] = ContextVar(
    "iris.in_handler", default=None
)
"""The event loop of the service whose handler this task or thread is, or was started by; None if there is none.

It is set once for each worker (`iris.contexts`), not for each message. A task that outlives its handler keeps it, which
matters only while a relay stops and waits for other handlers.
"""
_sessions: Final[set[weakref.ref[Session]]] = set()
"""Sessions of this process that were in use and may not have ended."""


os.register_at_fork(after_in_child=_sessions.clear)  # they are the parent's


def used(session: Session) -> None:
    """Note that a session is in use."""
    _sessions.add(weakref.ref(session, _sessions.discard))


def handlers_run_at(relay_id: bytes) -> bool:
    """Whether this process has handlers that run, and for which the relay with this id waits if it stops."""
    for ref in list(_sessions):  # a copy, because other threads may have clients, too
        session = ref()
        if session is not None and session.relay_id == relay_id and session.serving:
            return True
    return False
