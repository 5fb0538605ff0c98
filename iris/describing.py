"""Descriptions of members by themselves: their handlers, the types of these as JSON Schema, and their counts."""

from __future__ import annotations

import asyncio
import functools
import inspect
import time
import typing
from collections.abc import Awaitable, Callable, Iterable
from typing import Any, Final, TypeVar

import msgspec

from iris.core.message import Message, decode_payload
from iris.deadlines import seconds_left
from iris.errors import DecodeError, IrisError
from iris.handlers import Handler, Reply, Request
from iris.membership import Members
from iris.methods import Methods
from iris.parameters import MISSING, Provided, code_of
from iris.service import Service
from iris.tally import Tally
from iris.wire.kinds import Kind

DESCRIBE: Final = "iris.describe"
"""Method that every member answers with its `Description`."""
PING: Final = "iris.ping"
"""Method that every member answers at once with nothing."""
MAX_DESCRIPTION_BYTES: Final = 1 << 20
"""Largest description that is decoded, because a decoded one may take a hundred times as much memory."""
AT_ONCE: Final = 64
"""Members that are asked at the same time."""
_MAX_DOC: Final = 2000
T = TypeVar("T")
Send = Callable[[str, str, float], Awaitable[bytes]]
"""Sends a request without a payload: (member, method, timeout in seconds) -> reply."""


class HandlerInfo(msgspec.Struct, frozen=True):
    """One handler of a member.

    `kind` is "request", "push", "survey", "broadcast", "publish" or "tunnel". `name` is the method, or the filter of
    publications, or empty.
    """

    kind: str
    name: str
    function: str
    doc: str = ""
    argument: str = ""
    """The type of the payload as text; empty if the handler takes the whole message or does not say."""
    argument_schema: dict[str, Any] | None = None
    """JSON Schema of `argument`; None if it has none, as bytes."""
    result: str = ""
    result_schema: dict[str, Any] | None = None
    counted: bool = False
    """Whether the counts and times below are kept. They are for requests, pushes and surveys."""
    handled: int = 0
    """Calls whose function returned."""
    failed: int = 0
    """Calls whose function raised."""
    refused: int = 0
    """Calls that ended with a `Refusal`, or whose payload does not fit the type."""
    expired: int = 0
    """Calls that were not started, because their deadline had passed."""
    timed: int = 0
    """Calls that were timed: of plain functions every 16th, of other handlers all."""
    mean_ms: float = 0.0
    max_ms: float = 0.0
    times: dict[int, int] = {}
    """Timed calls by the time that they took: upper bound in ns -> calls. Each bound is at most 5/4 of the one
    before."""


class Description(msgspec.Struct, frozen=True):
    """One member of a cluster, as it describes itself. `queued` counts messages that wait for a free handler."""

    member: str
    service: str
    version: str
    description: str
    handlers: list[HandlerInfo]
    running: int
    queued: int
    uptime_s: float
    iris: str
    """Version of the library."""
    host: str = ""
    """Name of its host, as the host itself says."""
    pid: int = 0
    queued_bytes: int = 0
    """Bytes of the messages that are queued or running."""
    dropped: dict[str, int] = {}
    """Messages that its process dropped, by cause; they may be those of other services in the process."""
    loop_held: int = 0
    """How often a handler of this cluster held up the event loop of its process for 0.1 s or more."""


@functools.cache
def library_version() -> str:
    """Return the version of the installed library; "unknown" if it runs from a folder that is not installed."""
    from importlib.metadata import (
        PackageNotFoundError,
        version,
    )  # slow, and most programs do not need it

    try:
        return version("iris-messaging")
    except PackageNotFoundError:
        return "unknown"


def describe_handlers(
    service: Service, provided: Provided, tally_of: Callable[[Kind, str], Tally | None]
) -> list[HandlerInfo]:
    """Return a description of each handler of a service."""
    found = []
    for kind, handler in service.handlers.items():
        named = handler.handlers if isinstance(handler, Methods) else {"": handler}
        what = "tunnel" if kind == Kind.TUNNEL_OPEN else kind.name.lower()
        for name, each in named.items():
            found.append(_describe(what, name, each, provided, tally_of(kind, name)))
    for topic in service.topics:
        found.append(_describe("publish", topic.pattern, topic.handler, provided, None))
    return found


def read_description(packed: bytes) -> Description:
    """Return the description that a member answered with. Raises DecodeError."""
    if len(packed) > MAX_DESCRIPTION_BYTES:
        raise DecodeError(
            f"a description of {len(packed)} bytes is over the limit of {MAX_DESCRIPTION_BYTES}"
        )
    found: Description = decode_payload(packed, True, Description, "reply")
    return found


def _describe(
    kind: str, name: str, handler: Handler, provided: Provided, tally: Tally | None
) -> HandlerInfo:
    payload, whole = None, False
    for parameter in handler.parameters:
        if parameter.hint in (Message, Request):
            whole = True
        elif kind != "tunnel" and provided.find(parameter.type) is MISSING:
            payload = parameter.hint
    try:
        result = typing.get_type_hints(code_of(handler.function)).get("return")
    except (
        NameError,
        TypeError,
        AttributeError,
    ):  # the handler itself works without its result's type
        result = None
    result = None if result in (Reply, Any) or kind not in ("request", "survey") else result
    counts: dict[str, Any] = {}
    if tally is not None:
        timed = tally.timed or 1
        counts = {
            "counted": True, "handled": tally.handled, "failed": tally.failed, "refused": tally.refused,
            "expired": tally.expired, "timed": tally.timed, "mean_ms": tally.total_ns / timed / 1e6,
            "max_ms": tally.max_ns / 1e6, "times": tally.shown_times(),
        }  # fmt: skip
    return HandlerInfo(
        kind, name, handler.name, (inspect.getdoc(handler.function) or "")[:_MAX_DOC],
        _text(payload) if payload is not None or not whole else "", _schema(payload), _text(result), _schema(result),
        **counts,
    )  # fmt: skip


def _text(hint: Any) -> str:
    if hint is None:
        return ""
    return hint.__name__ if isinstance(hint, type) and not typing.get_args(hint) else str(hint)


def _schema(hint: Any) -> dict[str, Any] | None:
    """Return the JSON Schema of a type; None if it has none."""
    if hint is None or hint in (bytes, bytearray, memoryview):
        return None
    try:
        return msgspec.json.schema(hint)
    except (TypeError, ValueError, RecursionError):  # msgspec has no schema for it
        return None


class Ping(msgspec.Struct, frozen=True):
    """The answer of one member to a ping."""

    member: str
    rtt_s: float
    """Time from the request to the reply, in seconds. The handlers of the member take no part in it."""


class PerMember(list[T]):
    """One item for each member of this site that answered, oldest member first."""

    def __init__(
        self, answers: Iterable[T], failed: dict[str, IrisError], sites: dict[str, int]
    ) -> None:
        super().__init__(answers)
        self.failed = failed
        """Members that gave no answer: id -> what a request to that member raised."""
        self.sites = sites
        """Members in other sites, which cannot be asked one by one: site -> number."""


async def describe_member(send: Send, member: str, timeout: float) -> Description:
    """Ask one member what it is."""
    return read_description(await send(member, DESCRIBE, timeout))


async def ping_member(send: Send, member: str, timeout: float) -> Ping:
    """Measure the round trip to one member."""
    started_s = time.perf_counter()
    await send(member, PING, timeout)
    return Ping(member, time.perf_counter() - started_s)


async def ask_members(
    members: Members, ask: Callable[[str, float], Awaitable[T]], timeout: float
) -> PerMember[T]:
    """Await `ask(member, seconds left)` for each member, at most `AT_ONCE` at once, and collect the results."""
    room, until_s = asyncio.Semaphore(AT_ONCE), time.monotonic() + timeout
    answers: dict[str, T] = {}
    failed: dict[str, IrisError] = {}

    async def one(member: str) -> None:
        async with room:
            try:
                answers[member] = await ask(member, seconds_left(until_s))
            except IrisError as err:
                failed[member] = err

    async with asyncio.TaskGroup() as group:
        for info in members:
            group.create_task(one(info.member))
    order = [info.member for info in members if info.member in answers]
    return PerMember([answers[member] for member in order], failed, members.sites)
