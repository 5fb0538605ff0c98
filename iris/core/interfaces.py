"""Interfaces between a session and the client that owns it: services, subscriptions, waiters, deliveries, losses."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final, Protocol

import msgspec

from iris.core.bundle import Headers
from iris.core.faults import fault_headers
from iris.core.inbound import InFlow
from iris.core.message import Message
from iris.core.tunnel import TunnelEnd
from iris.crypto.keys import ClusterKey
from iris.errors import IrisError, RemoteError
from iris.wire.kinds import ANSWER, FAULT, REPLY, SURVEY, Refusal


class Waiter(Protocol):
    """Receives one result or exception. asyncio.Future is one."""

    def done(self) -> bool: ...
    def set_result(self, result: Any, /) -> None: ...
    def set_exception(self, exception: BaseException, /) -> None: ...


class Binding(Protocol):
    """A service that joined through this session, as the session sees it.

    `number` is unique in the process, never reused.
    """

    @property
    def number(self) -> int: ...

    def admit(self, kind: int, size: int) -> Refusal | None: ...
    def dispatch(self, delivery: Delivery) -> None: ...
    def call(self, delivery: Delivery, method: str) -> None:
        """Run a delivery with the handler of a method, or answer that there is none."""

    def broadcast(self, messages: list[Message], size: int) -> None: ...
    def tunnel(self, end: TunnelEnd) -> None: ...
    def gap(self, loss: Loss) -> None: ...


class Sink(Protocol):
    """A subscription as the session sees it."""

    @property
    def waits(self) -> bool:
        """Whether publishers must wait when its queue is full, instead of having messages dropped."""

    @property
    def limit_bytes(self) -> int:
        """Limit of its queue in bytes."""

    def held(self, name: str, source: bytes) -> int:
        """Return the queued bytes of one sender's publications to a topic. Counted only if `waits`."""

    def deliver(self, messages: list[Message], size: int) -> None: ...
    def gap(self, loss: Loss) -> None: ...


class Owner(Protocol):
    """The client that owns a session."""

    def find_key(self, key_id: bytes) -> ClusterKey | None: ...
    def binding(self, flow: InFlow) -> Binding | None:
        """Return the service that a flow addresses, or None if no local service joined that address,
        whatever the relay says."""

    def sinks(self, flow: InFlow) -> Sequence[Sink]: ...
    def draining(self) -> None: ...
    def lost(self, loss: Loss) -> None: ...
    def other_keys(self, topic: str, key_id: bytes, others: dict[str, int]) -> None:
        """Note that a topic published to under a key has subscribers only under other keys."""

    def out_full(self) -> None: ...


_NOUNS: Final = {
    "push": ("push", "pushes"),
    "publish": ("publication", "publications"),
    "broadcast": ("broadcast", "broadcasts"),
}
"""What one and several messages of each kind of loss are called."""


class Loss:
    """A report of messages that did not arrive: `count` of them (None if unknown), and the `cause`.

    For a push that failed, `error` is what a request would have raised.
    """

    __slots__ = ("cause", "count", "error", "kind", "name", "source")

    def __init__(
        self, kind: str, name: str, source: bytes, count: int | None, cause: str, error: IrisError | None = None
    ) -> None:  # fmt: skip
        self.kind = kind
        self.name = name
        self.source = source
        self.count = count
        self.cause = cause
        self.error = error

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.kind, self.name, self.source, self.count, self.cause, self.error)

    def __str__(self) -> str:
        one, many = _NOUNS.get(self.kind, ("message", "messages"))
        number = "an unknown number of" if self.count is None else self.count
        return f"{number} {one if self.count == 1 else many} to {self.name}: {self.cause}"

    def __repr__(self) -> str:
        return f"Loss({self.kind} {self.name!r}: {'?' if self.count is None else self.count}, {self.cause})"


class SurveySink(Protocol):
    """Receiver of the answers to one survey."""

    def roster(self, members: list[str]) -> None: ...
    def answer(self, message: Message) -> None: ...
    def fault(self, member: str, error: RemoteError) -> None: ...
    def done(self, lost: list[str], error: IrisError | None) -> None: ...


class Answering(Protocol):
    """The session by which a delivery came, and which sends its answer."""

    message_limit: int
    relay_id: bytes
    running: int
    """Deliveries of this session whose handlers have not ended yet. The bindings count them."""
    cancels: dict[int, Callable[[], None]]
    """Hop id -> what to call when the caller of that delivery leaves, or can no longer be answered."""

    def answer(
        self, delivery: Delivery, kind: int, payload: bytes, headers: Headers | None, packed: bool
    ) -> None: ...
    def credit(self, member: int, kind: int, hop: int, *, started: bool) -> None: ...


class Delivery(msgspec.Struct, eq=False):
    """A request, push or survey that was accepted for running.

    It ends by exactly one call of `reply`, `fault` or `finish`.
    """

    session: Answering
    flow: InFlow
    hop: int
    deadline_us: int
    counter: int
    message: Message
    size: int

    def reply(self, payload: bytes, headers: Headers | None, packed: bool) -> None:
        """Answer a request or survey."""
        kind = ANSWER if self.flow.kind == SURVEY else REPLY
        self.session.answer(self, kind, payload, headers, packed)

    def fault(
        self, detail: str, *, may_have_run: bool, member: str = "", code: str = "", details: bytes = b""
    ) -> None:  # fmt: skip
        """Answer a request or survey with an error. The caller receives `detail`, up to 4,096 characters.

        `code` and `details` (MessagePack) are those of a `Refusal`.
        """
        headers = fault_headers(member, may_have_run=may_have_run, code=code, packed=details)
        text = detail[:4096].encode(errors="backslashreplace")  # a file name may hold surrogates
        self.session.answer(self, FAULT, text, headers, False)

    def finish(self, *, started: bool = True) -> None:
        """End a push; its credit is returned at the end of the turn.

        If it was not `started`, its sender gets a report.
        """
        self.session.credit(self.flow.member, self.flow.kind, self.hop, started=started)
