"""Token buckets: a rate of messages and bytes, and what is left of it.

A bucket holds one second's worth. A frame is accepted whole while there is a message and a byte left, and may
overdraw the bucket, which then has to refill; so the average holds whatever the sizes of frames are.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from iris.wire.names import plural


@dataclass(frozen=True, slots=True)
class Rate:
    """A quota: messages and bytes a second; 0 means no limit."""

    messages: int = 0
    bytes: int = 0

    def __bool__(self) -> bool:
        return bool(self.messages or self.bytes)

    def __str__(self) -> str:
        parts = [f"{plural(self.messages, 'message')}/s"] if self.messages else []
        parts += [f"{plural(self.bytes, 'byte')}/s"] if self.bytes else []
        return " and ".join(parts)


class Bucket:
    """The state of one quota, and how many messages it has refused."""

    __slots__ = ("_at_us", "_bytes", "_messages", "name", "rate", "refused")

    def __init__(self, name: str, rate: Rate, now_us: int) -> None:
        self.name = name
        self.rate = rate
        self.refused = 0
        self._messages = float(rate.messages)
        self._bytes = float(rate.bytes)
        self._at_us = now_us

    def is_empty(self, now_us: int) -> bool:
        """Refill by the time that has passed, and return whether nothing may be sent now."""
        passed_s = max(0, now_us - self._at_us) / 1e6
        self._at_us = now_us
        rate = self.rate
        self._messages = min(rate.messages, self._messages + passed_s * rate.messages)
        self._bytes = min(rate.bytes, self._bytes + passed_s * rate.bytes)
        return (rate.messages > 0 and self._messages < 1) or (rate.bytes > 0 and self._bytes <= 0)

    def take(self, messages: int, size: int) -> None:
        """Count a frame that was accepted."""
        self._messages -= messages
        self._bytes -= size

    def refuse(self, messages: int) -> str:
        """Count messages that were not accepted, and return why, with the time until the next is."""
        self.refused += messages
        rate = self.rate
        wait_s = max(
            (1 - self._messages) / rate.messages if rate.messages else 0.0,
            -self._bytes / rate.bytes if rate.bytes else 0.0,
        )
        wait_ms = max(1, math.ceil(1000 * wait_s))
        return (
            f"over the {self.name} of {rate}; wait {wait_ms} ms, or raise the quota at this relay"
        )
