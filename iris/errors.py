"""Everything Iris raises.

    IrisError
    ├── ConfigError            a setting, file or environment variable is wrong; the text names it
    │   └── KeyringError       a key file is missing, unreadable, too open or malformed
    ├── InvalidName            a cluster, topic or filter is outside the grammar (also a ValueError)
    ├── RelayUnavailable       no relay answered at the address; the text says how to start one
    ├── Closed                 the object was closed by this process; fix the call
    ├── MessageTooLarge        nothing was sent; use a tunnel (also a ValueError)
    ├── DecodeError            a payload does not fit the type that was asked for
    ├── SealError              a message could not be sealed or opened
    │   ├── OpenError          forged, damaged, spliced or sealed under another key
    │   ├── Replayed           accepted before; it may have run
    │   └── Stale              too old to tell apart from a replay; it has not run here
    ├── RequestError           a request, push or survey failed; says `may_have_run`
    │   ├── NoMembers          nobody serves it; it has not run
    │   ├── Overloaded         everybody who serves it is full; it has not run
    │   ├── RequestTimeout     no reply in time (also a TimeoutError); it may have run
    │   ├── ConnectionLost     the member, its relay or ours went away on the way
    │   ├── RelayError         a relay refused it; the text is the relay's, and no key holder sealed it
    │   └── RemoteError        the handler raised, or the body did not decode; the text is the member's, and sealed
    ├── StreamError            a durable stream did not do what was asked
    │   ├── NoStream           no store holds it under our keys
    │   ├── StreamExists       it is there and defined otherwise; names the holder
    │   ├── AmbiguousStream    two stores hold one of this name; name the uuid
    │   ├── OffsetConflict     the next offset is not the expected one; nothing was stored
    │   ├── StagedMissing      a batch's attempt is not staged, or not whole; nothing was committed
    │   ├── StreamDamaged      the store's disk does not hold what was written
    │   └── StreamUnavailable  the store, its disk or the way to it; says `may_have_run`
    ├── TunnelBroken           the tunnel ended without both sides closing it
    └── ProtocolError          bytes that the protocol does not allow
        ├── LocalProtocolError we erred
        └── PeerProtocolError  they erred; ends their connection, never shown to another peer

Siblings differ by what the caller should do: fix a call (`Closed`, `InvalidName`), wait or retry (`NoMembers`,
`Overloaded`), reconnect (`ConnectionLost`, automatic), read the message (`RemoteError`, `RelayError`).

Only RemoteError comes from a holder of the key. The others come from relays or from this process, and their
`may_have_run=False` is only as trustworthy as the relays on the way.
"""

from __future__ import annotations


class IrisError(Exception):
    """Root of everything Iris raises."""


class ConfigError(IrisError):
    """A setting, file or environment variable is wrong."""


class KeyringError(ConfigError):
    """A key file is missing, unreadable, too open or malformed. Never carries a secret."""


class InvalidName(IrisError, ValueError):
    """A cluster, topic or filter is outside the grammar."""


class RelayUnavailable(IrisError):
    """No relay answered at the address."""


class Closed(IrisError):
    """The object was closed by this process."""


class MessageTooLarge(IrisError, ValueError):
    """A message is over the limit; nothing was sent."""


class DecodeError(IrisError, ValueError):
    """A payload does not fit the type that was asked for."""


class SealError(IrisError):
    """A message could not be sealed or opened."""


class OpenError(SealError):
    """The message is forged, damaged, spliced or sealed under another key. One reason for all."""


class Replayed(SealError):
    """The message was accepted before."""


class Stale(SealError):
    """The message is too old to tell it apart from a replay."""


class RequestError(IrisError):
    """A message to `cluster` failed; `may_have_run` is False when a retry is certainly safe."""

    may_have_run = True

    def __init__(self, cluster: str, detail: str) -> None:
        super().__init__(f"{cluster}: {detail}")
        self.cluster = cluster
        self.detail = detail


class NoMembers(RequestError):
    """Nobody serves the cluster under our key."""

    may_have_run = False


class Overloaded(RequestError):
    """Every member is full, or refused it before running it."""

    may_have_run = False


class RequestTimeout(RequestError, TimeoutError):
    """No reply came in time."""


class ConnectionLost(RequestError):
    """The member, its relay or ours went away before the reply came."""

    def __init__(self, cluster: str, detail: str, *, may_have_run: bool = True) -> None:
        super().__init__(cluster, detail)
        self.may_have_run = may_have_run


class RelayError(RequestError):
    """A relay reports that the message was refused; `detail` is the relay's text, which no key holder sealed.

    The member cannot open it, it was seen before or is too old, the member did not run it, or a site's policy forbids it.
    `may_have_run` is True where an honest relay cannot know.
    """

    def __init__(self, cluster: str, detail: str, *, may_have_run: bool = True) -> None:
        super().__init__(cluster, detail)
        self.may_have_run = may_have_run


class RemoteError(RequestError):
    """The member answered with an error; `detail` is its text, sealed with the key.

    `may_have_run` is False when that member refused the message before its handler saw it
    (a body that does not decode, clocks that are too far apart).
    """

    def __init__(self, cluster: str, detail: str, *, may_have_run: bool = True) -> None:
        super().__init__(cluster, detail)
        self.may_have_run = may_have_run


_BEFORE = "; an earlier attempt may have run"


def ran_before(error: RequestError | StreamError) -> None:
    """Note in the error of a repeated call that an earlier attempt may have run, whatever became of this one."""
    if not error.may_have_run:
        error.may_have_run = True
        error.detail += _BEFORE
        error.args = (f"{error.args[0]}{_BEFORE}",)


class StreamError(IrisError):
    """A durable stream did not do what was asked; `may_have_run` is False when nothing was stored or changed."""

    may_have_run = False
    passing = False
    """It may be over in a moment: the store, or the way to it, was away."""

    def __init__(self, stream: str, detail: str) -> None:
        super().__init__(f"stream {stream}: {detail}")
        self.stream = stream
        self.detail = detail


class NoStream(StreamError):
    """No store holds it under our keys."""


class StreamExists(StreamError):
    """A stream of this name is there, and defined otherwise."""


class AmbiguousStream(StreamError):
    """Two stores hold a stream of this name; the text lists them by uuid."""


class OffsetConflict(StreamError):
    """The next offset is `next`, not the expected one; nothing was stored."""

    def __init__(self, stream: str, detail: str, next: int) -> None:
        super().__init__(stream, detail)
        self.next = next


class StagedMissing(StreamError):
    """An attempt at a batch is not staged as it was said to be: stage it again. Nothing was committed."""


class StreamDamaged(StreamError):
    """The store's disk does not hold what was written there; what is before can be read."""


class StreamUnavailable(StreamError):
    """The store, its disk or the way to it did not do it in time."""

    def __init__(self, stream: str, detail: str, *, may_have_run: bool = False) -> None:
        super().__init__(stream, detail)
        self.may_have_run = may_have_run


class TunnelBroken(IrisError):
    """The tunnel ended without both sides closing it; messages in flight are lost."""


class ProtocolError(IrisError):
    """Bytes that the protocol does not allow."""


class LocalProtocolError(ProtocolError):
    """This side asked for something the protocol does not allow."""


class PeerProtocolError(ProtocolError):
    """The other side sent something the protocol does not allow; its connection ends."""
