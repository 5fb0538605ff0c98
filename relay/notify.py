"""Tells the service manager how far the daemon has come: sd_notify(3), without libsystemd."""

from __future__ import annotations

import logging
import socket
from collections.abc import Mapping

log = logging.getLogger(__name__)

VARIABLE = "NOTIFY_SOCKET"


def ready(environ: Mapping[str, str]) -> bool:
    """Say that the relay accepts sessions (`READY=1`); see `notify`."""
    return notify(environ, "READY=1")


def stopping(environ: Mapping[str, str]) -> bool:
    """Say that the relay has begun to stop (`STOPPING=1`); see `notify`."""
    return notify(environ, "STOPPING=1")


def notify(environ: Mapping[str, str], state: str) -> bool:
    """Send `state` to the socket that NOTIFY_SOCKET names; never waits and never raises OSError.

    True when it was sent. False when nobody asked (the variable is unset or empty), or, after a
    warning in the log, when it could not be sent: the relay is worth more than the notification.
    """
    address = environ.get(VARIABLE, "")
    if not address:
        return False
    if address[0] not in "/@":
        log.warning("notify.failed", extra={"fields": {"address": address, "error": "not a path"}})
        return False
    # A leading @ stands for the NUL byte of an abstract address.
    target = "\0" + address[1:] if address[0] == "@" else address
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
            sender.setblocking(False)
            sender.sendto(state.encode(), target)
    except OSError as error:
        log.warning("notify.failed", extra={"fields": {"address": address, "error": str(error)}})
        return False
    return True
