"""Notifies the service manager of the state of a relay or of `iris run`: sd_notify(3) without libsystemd."""

from __future__ import annotations

import logging
import socket
import time
from collections.abc import Mapping

log = logging.getLogger(__name__)

VARIABLE = "NOTIFY_SOCKET"


def ready(environ: Mapping[str, str]) -> bool:
    """Report that the process serves (`READY=1`); see `notify`."""
    return notify(environ, "READY=1")


def reloading(environ: Mapping[str, str]) -> bool:
    """Report that keys or settings are being read again (`RELOADING=1`); `ready` reports the end. See `notify`."""
    return notify(environ, f"RELOADING=1\nMONOTONIC_USEC={time.monotonic_ns() // 1000}")


def stopping(environ: Mapping[str, str]) -> bool:
    """Report that the process has begun to stop (`STOPPING=1`); see `notify`."""
    return notify(environ, "STOPPING=1")


def notify(environ: Mapping[str, str], state: str) -> bool:
    """Send `state` to the socket that NOTIFY_SOCKET names; never waits and never raises OSError.

    Return True if it was sent. Return False if the variable is unset or empty, or if sending failed: that
    is logged as a warning, because the process must run even if the notification is lost.
    """
    address = environ.get(VARIABLE, "")
    if not address:
        return False
    if address[0] not in "/@":
        log.warning(
            "notify.failed",
            extra={
                "fields": {
                    "address": address,
                    "error": "it is not a path; it must begin with / or @",
                }
            },
        )
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
