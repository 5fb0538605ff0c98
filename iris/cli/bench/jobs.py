"""The load that a bench is to send, and its outcome; coordinator and workers send these to each other."""

from __future__ import annotations

import math
import struct
from typing import Annotated, Final, Literal

import msgspec
from msgspec import Meta

from iris.wire.codec import DEFAULT_MESSAGE_LIMIT

MAX_RATE: Final = 1_000_000.0
MAX_SECONDS: Final = 3600.0
MAX_CONNECTIONS: Final = 1000
MAX_INFLIGHT: Final = 10_000
MAX_MESSAGE: Final = DEFAULT_MESSAGE_LIMIT
"""Largest request or publication in bytes: the default limit of clients and relays."""
MAX_TUNNEL_MESSAGE: Final = 16 << 20
MAX_TIMEOUT: Final = 60.0
MAX_HISTOGRAM: Final = 256 << 10
"""Longest encoded histogram in characters: one with every counter in use is shorter."""

STAMP: Final = struct.Struct("<8sQqq")
"""Head of a publication: run id, number, intended and actual time of sending."""
NUMBER: Final = struct.Struct("<Q")
"""Head of a tunnel message: its number, which the serving side sends back."""

Verb = Literal["request", "publish", "tunnel"]
Name = Annotated[str, Meta(max_length=255)]
Text = Annotated[str, Meta(max_length=4096)]
Tallies = Annotated[dict[Name, Annotated[int, Meta(ge=0)]], Meta(max_length=100)]
Encoded = Annotated[str, Meta(max_length=MAX_HISTOGRAM)]


class Load(msgspec.Struct, frozen=True):
    """Load that one process is to send. Only `msgspec.convert` and decoding check the limits, not the constructor."""

    verb: Verb
    target: Name
    """The cluster, or the topic."""
    size: Annotated[int, Meta(ge=0, le=MAX_TUNNEL_MESSAGE)]
    seconds: Annotated[float, Meta(gt=0, le=MAX_SECONDS)]
    timeout: Annotated[float, Meta(gt=0, le=MAX_TIMEOUT)]
    rate: Annotated[float, Meta(gt=0, le=MAX_RATE)] | None = None
    """Messages per second; None: a closed loop of `inflight` requests."""
    inflight: Annotated[int, Meta(ge=1, le=MAX_INFLIGHT)] | None = None
    connections: Annotated[int, Meta(ge=1, le=MAX_CONNECTIONS)] = 1

    def __post_init__(self) -> None:
        if (self.rate is None) == (self.inflight is None):
            raise ValueError("a load has either a rate or a number in flight; give one of them")
        if self.inflight is not None and self.verb != "request":
            raise ValueError(
                f"a number in flight is for requests only; give a rate for {self.verb}"
            )
        if not all(map(math.isfinite, (self.rate or 1.0, self.seconds, self.timeout))):
            raise ValueError("rate, seconds and timeout must be finite numbers")
        least = {"request": 0, "publish": STAMP.size, "tunnel": NUMBER.size}[self.verb]
        most = MAX_TUNNEL_MESSAGE if self.verb == "tunnel" else MAX_MESSAGE
        if not least <= self.size <= most:
            raise ValueError(
                f"size: {self.size} bytes is not from {least} to {most}, which a {self.verb} bench can send"
            )


class Outcome(msgspec.Struct, frozen=True):
    """Outcome of a load in one process. Histograms are HDR, in nanoseconds, base64."""

    due: Annotated[int, Meta(ge=0)]
    """Messages that the rate and the time ask for; in a closed loop, those sent."""
    sent: Annotated[int, Meta(ge=0)]
    answered: Annotated[int, Meta(ge=0)]
    """Replies, deliveries or acknowledgements: as many as each histogram has samples."""
    errors: Tallies
    """Exception name -> count."""
    not_sent: Tallies
    """Messages due and not sent: reason -> count."""
    lost: Tallies
    """Publications that were not delivered: cause -> count."""
    sending_s: Annotated[float, Meta(gt=0)]
    """Seconds from the start to the last message sent, and at least `Load.seconds`."""
    total_s: Annotated[float, Meta(gt=0)]
    """Seconds from the start to the last answer, and at least `sending_s`."""
    latest_ms: Annotated[float, Meta(ge=0)]
    """Longest delay between the time a message was due and the time it was sent."""
    uncorrected: Encoded
    """Latencies from the actual time of sending."""
    corrected: Encoded | None = None
    """Latencies from the intended time of sending; None in a closed loop, which has no intended times."""


BEHIND: Final = "fell behind"
OUTSTANDING: Final = "too many outstanding"
