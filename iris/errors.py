"""All exceptions that Iris raises.

    IrisError
    ├── ConfigError            a setting, file or environment variable is wrong; the text names it
    │   └── KeyringError       a key file is missing, unreadable, readable by others or malformed; or it lacks a key
    ├── InvalidName            a cluster, topic or filter name is not allowed (also a ValueError)
    ├── RelayUnavailable       no relay answered at the address; the text says how to start one
    ├── Closed                 your program closed the object that it uses; fix the call
    ├── MessageTooLarge        a message is over the limit and was not sent; use a tunnel (also a ValueError)
    ├── DecodeError            a payload does not fit the requested type (also a ValueError)
    │   └── EncodeError        a value cannot be sent; nothing was sent (also a TypeError)
    ├── SealError              a message could not be sealed or opened
    │   ├── OpenError          forged, damaged, spliced or sealed under another key
    │   ├── Replayed           a copy of a message that was accepted before; it may have run
    │   └── Stale              too old to tell apart from a replay, so it was refused
    ├── RequestError           a request, push or survey failed; see its `may_have_run`
    │   ├── NoMembers          no member serves it; it has not run
    │   ├── Overloaded         all members that serve it are at capacity; it has not run
    │   ├── RequestTimeout     no reply within the timeout; see its `may_have_run` (also a TimeoutError)
    │   ├── ConnectionLost     the member, its relay or the local relay was lost before the reply arrived
    │   ├── RelayError         a relay refused it; the text is from the relay, so no key holder vouches for it
    │   └── RemoteError        the handler raised or refused (see its `code`), or the body does not decode; sealed
    ├── StreamError            an operation on a durable stream failed; see its `may_have_run`
    │   ├── NoStream           no store has the stream under your keys
    │   ├── StreamSuperseded   another log has taken the place of the one that was used; the text names both
    │   ├── StreamExists       the stream exists with another definition; the text names its store
    │   ├── AmbiguousStream    several stores have a stream of this name; name it by uuid
    │   ├── OffsetConflict     the stream does not end at the expected offset; nothing was stored
    │   ├── StagedMissing      an attempt of a batch is not staged, or incomplete; nothing was committed
    │   ├── NotActive          another worker of the consumer is active, so what this one settled was refused
    │   ├── TooManyWorkers     no more workers can stand by for the consumer
    │   ├── StreamDamaged      the store's disk no longer has what was written to it
    │   └── StreamUnavailable  the store, its disk or the connection to it failed or did not answer in time
    ├── TunnelBroken           the tunnel ended although neither side closed it
    └── ProtocolError          bytes that the protocol does not allow
        ├── LocalProtocolError this process asked for something that the protocol or the relay does not allow
        └── PeerProtocolError  the peer sent such bytes; only the connection to that peer ends

The classes differ by what you do next: fix the call (`Closed`, `InvalidName`), wait or retry (`NoMembers`,
`Overloaded`), wait for the automatic reconnect (`ConnectionLost`), or read the code and the text (`RemoteError`,
`RelayError`).

A handler refuses a message with `iris.Refusal`, which is not in this tree: Iris never raises it.

Only RemoteError comes from a holder of the key. All others come from relays or from this process, so their
`may_have_run=False` is only as trustworthy as the relays on the path.
"""

from __future__ import annotations

from typing import Any, TypeVar

E = TypeVar("E", bound="RequestError")


class Picklable(Exception):
    """An exception whose copies, by `pickle` or `copy`, have its text, its attributes and its notes.

    A copy is made without `__init__`, so a subclass may have any parameters. It has no `__cause__` and no traceback, as
    with all exceptions.
    """

    def __reduce__(self) -> tuple[object, ...]:
        return _rebuilt, (type(self), self.args), self.__dict__ or None


def _rebuilt(kind: type[Picklable], args: tuple[object, ...]) -> Picklable:
    error = kind.__new__(kind, *args)
    error.args = args  # an OSError, such as RequestTimeout, leaves this to its __init__
    return error


class IrisError(Picklable):
    """Base class of all exceptions that Iris raises. Its instances can be pickled and copied."""


class ConfigError(IrisError):
    """A setting, file or environment variable is wrong; the text names it and says what is allowed."""


class KeyringError(ConfigError):
    """A key file is missing, unreadable, readable by others or malformed, or it lacks a key.

    The text has no secret.
    """


class InvalidName(IrisError, ValueError):
    """A cluster, topic or filter name is not allowed; the text says why."""


class RelayUnavailable(IrisError):
    """No relay answered at the address, or the one that did is not trusted; the text says how to start one."""


class Closed(IrisError):
    """The client, tunnel or other object was not opened yet, or was closed by this program. Fix the call."""


class MessageTooLarge(IrisError, ValueError):
    """A message is over the size limit and was not sent. Send it through a tunnel, or in parts."""


class DecodeError(IrisError, ValueError):
    """A payload does not fit the requested type.

    `may_have_run` is True if the payload is a reply or an answer: then the handler has run.
    """

    may_have_run = False


class EncodeError(DecodeError, TypeError):
    """A value cannot be sent: msgspec cannot encode an object of its type, or a text has surrogates. Nothing was sent.

    In this version it is a `DecodeError`, which such values raised before. In the next version it will not be one:
    catch EncodeError.
    """


class SealError(IrisError):
    """A message could not be sealed or opened."""


class OpenError(SealError):
    """A message is forged, damaged, spliced or sealed under another key. The text never says which."""


class Replayed(SealError):
    """A message is a copy of one that was accepted before."""


class Stale(SealError):
    """A message is too old to tell it apart from a replay."""


class RequestError(IrisError):
    """A request, push, survey or tunnel opening to `cluster` failed.

    `may_have_run` is False only if no handler has run, so that sending it again is safe. If Iris repeated an idempotent
    call, any error of it may have `may_have_run=True`. `detail` is the text without the cluster.
    """

    may_have_run = True
    overdue: tuple[str, float] | None = None
    """What did not happen in time, and the seconds it had, if `detail` begins with "... within ... s"."""

    def __init__(self, cluster: str, detail: str) -> None:
        super().__init__(f"{cluster}: {detail}")
        self.cluster = cluster
        self.detail = detail


class NoMembers(RequestError):
    """No member serves this kind of message in the cluster under your key, so this attempt has not run."""

    may_have_run = False


class Overloaded(RequestError):
    """All members are at capacity, or refused the message before running it. Retry later, or add members."""

    may_have_run = False


class RequestTimeout(RequestError, TimeoutError):
    """No reply, or nothing else that was waited for, arrived within the timeout.

    `may_have_run` is False only if no handler can have started.
    """


class ConnectionLost(RequestError):
    """The member, its relay or the local relay was lost before the reply arrived. The client reconnects by itself."""

    def __init__(self, cluster: str, detail: str, *, may_have_run: bool = True) -> None:
        super().__init__(cluster, detail)
        self.may_have_run = may_have_run


class RelayError(RequestError):
    """A relay reports that a message was refused. `detail` is the text of the relay, which no key holder sealed.

    Reasons: the member cannot open the message, received it before, finds it too old or did not run it, or a policy
    between sites forbids it. `may_have_run` is True if an honest relay cannot know.
    """

    def __init__(self, cluster: str, detail: str, *, may_have_run: bool = True) -> None:
        super().__init__(cluster, detail)
        self.may_have_run = may_have_run


class RemoteError(RequestError):
    """The member answered with an error. `detail` is the text of the member, sealed with the cluster's key.

    `code` and `details` are those of the `Refusal` that the handler raised. Without one, `code` is None: the handler
    failed. A member that has no handler for the `method` of a call
    answers with the code "no_method".

    `may_have_run` is False if the member refused the message before its handler saw it: the body does not decode,
    there is no such method, or the two clocks differ too much. It is True after a `Refusal`, because the handler ran
    up to there.
    """

    def __init__(
        self, cluster: str, detail: str, *, may_have_run: bool = True, code: str | None = None,
        details: dict[str, Any] | None = None,
    ) -> None:  # fmt: skip
        super().__init__(cluster, detail)
        self.may_have_run = may_have_run
        self.code = code
        self.details = details or {}


def with_deadline(error: E, what: str, timeout: float) -> E:
    """Return `error`, whose detail is "`what` within `timeout` s", prepared for `name_timeout`."""
    error.overdue = what, timeout
    return error


def away_text(away_s: float) -> str:
    """Return the text to add to a deadline's error if the relay was away for some of the time, else ""."""
    shown = f"{away_s:.1f}" if away_s >= 1 else f"{away_s:.2g}"
    return f" (the relay was away for {shown} s of it)" if away_s >= 0.001 else ""


def name_timeout(error: RequestError, timeout: float, away_s: float) -> None:
    """Change an error about a deadline to name the caller's timeout, and how long of it (s) the relay was away.

    A call that waits for a relay, or is sent again, has less time left for its last part.
    """
    if error.overdue is None and not isinstance(error, RequestTimeout):
        return
    cause = away_text(away_s) if isinstance(error, RequestTimeout) else ""
    if error.overdue is None:
        changed = f"{error.detail}; the timeout was {timeout:g} s{cause}"
    else:
        what, stated_s = error.overdue
        rest = error.detail.removeprefix(f"{what} within {stated_s:g} s")
        changed = f"{what} within {timeout:g} s{cause}{rest}"
        error.overdue = what, timeout
    error.args = (f"{error.args[0].removesuffix(error.detail)}{changed}",)
    error.detail = changed


_BEFORE = "; an earlier attempt may have run"


def ran_before(error: RequestError | StreamError) -> None:
    """Change the error of a repeated call to say that an earlier attempt may have run."""
    if not error.may_have_run:
        error.may_have_run = True
        error.detail += _BEFORE
        error.args = (f"{error.args[0]}{_BEFORE}",)


class StreamError(IrisError):
    """An operation on a durable stream failed. `may_have_run` is False if nothing was stored or changed."""

    may_have_run = False
    passing = False
    """Whether the cause may pass by itself: the store, or the connection to it, was away."""

    def __init__(self, stream: str, detail: str) -> None:
        super().__init__(f"stream {stream}: {detail}")
        self.stream = stream
        self.detail = detail


class NoStream(StreamError):
    """No store has this stream under your keys."""


class StreamExists(StreamError):
    """A stream of this name exists with another definition, or on a disk instead of in a bucket."""


class AmbiguousStream(StreamError):
    """Several stores have a stream of this name; the text lists them. Name the one you mean by its uuid."""


class StreamSuperseded(StreamError):
    """Another log has taken the place of the one that you used; the text names both. Use the name without a uuid."""


class OffsetConflict(StreamError):
    """The stream ends at offset `end`, not at the expected one. Nothing was stored."""

    def __init__(self, stream: str, detail: str, end: int) -> None:
        super().__init__(stream, detail)
        self.end = end


class StagedMissing(StreamError):
    """An attempt of a batch is not staged, or not as it was reported. Nothing was committed; stage it again."""


class NotActive(StreamError):
    """Another worker of the consumer took the place of this one, which was away for too long or was told to hand over.

    What this one settled since then was refused: the store delivers those messages to the active worker. If this one
    asks for messages again, it stands by.
    """


class TooManyWorkers(StreamError):
    """The consumer has as many workers as can be active or stand by. The text says how many."""


class StreamDamaged(StreamError):
    """The store's disk no longer has what was written to it. Everything before the damage can still be read."""


class StreamUnavailable(StreamError):
    """The store, its disk or the connection to it failed, or did not answer in time."""

    def __init__(self, stream: str, detail: str, *, may_have_run: bool = False) -> None:
        super().__init__(stream, detail)
        self.may_have_run = may_have_run


class TunnelBroken(IrisError):
    """The tunnel ended although neither side closed it. Messages on the way were lost."""


class ProtocolError(IrisError):
    """Bytes that the protocol does not allow."""


class LocalProtocolError(ProtocolError):
    """This process asked for something that the protocol, or its relay, does not allow."""


class PeerProtocolError(ProtocolError):
    """The peer sent bytes that the protocol does not allow; the connection to it ends."""
