"""Surveys: an async iterator over the answers of all members, which afterwards lists those that did not answer."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from typing import Any, Generic, Literal, TypeVar

from iris.core.bundle import Headers
from iris.core.message import MEMBER_HEADER, Message, check_decodable, decode_payload
from iris.deadlines import HANDLED, deadline, inherited_s, milliseconds, seconds_left
from iris.errors import Closed, ConfigError, DecodeError, IrisError, RemoteError
from iris.forks import FORKED, disable_in_child
from iris.one_process import OneProcess
from iris.runtime import Runtime
from iris.wire.kinds import HERE, Kind
from iris.wire.names import check_address, check_method

T = TypeVar("T")
Scope = Literal["site", "federation"]
"""Range of a survey or broadcast: the members of this site, or of all sites."""


class Survey(OneProcess, Generic[T]):
    """A survey, made by `Client.survey`. It is sent when the iteration begins.

    After the iteration:

    * `answered`: ids of the members that answered
    * `failed`: members that answered with an error: id -> text of the error
    * `errors`: the same errors with their codes and details: id -> RemoteError
    * `missing`: ids of the members that were asked and did not answer in time
    """

    def __init__(
        self,
        cluster: str,
        start: Callable[[Survey[Any]], Awaitable[Callable[[], None]]],
        wanted: Any,
    ) -> None:
        self.cluster = cluster
        self.answered: list[str] = []
        self.failed: dict[str, str] = {}
        self.errors: dict[str, RemoteError] = {}
        self.missing: list[str] = []
        self._start = start
        self._wanted = wanted
        self._asked: list[str] = []
        self._received: set[str] = set()
        """Members whose answer was received."""
        self._queue: deque[Message] = deque()
        self._waiter: asyncio.Future[None] | None = None
        self._ended = False
        self._error: IrisError | None = None

    async def __aiter__(self) -> AsyncIterator[T]:
        async with contextlib.aclosing(self.items()) as items:
            async for _, answer in items:
                yield answer

    async def items(self) -> AsyncGenerator[tuple[str, T], None]:
        """Iterate over (id of the member, its answer): `async for member, answer in client.survey(...).items()`."""
        forget = await self._start(self)
        disable_in_child(self)
        try:
            while True:
                while self._queue:
                    message = self._queue.popleft()
                    yield (message.headers or {}).get(MEMBER_HEADER, ""), self._decode(message)
                if self._ended:
                    break
                self._waiter = asyncio.get_running_loop().create_future()
                await self._waiter
            if self._error is not None:
                raise self._error
        finally:
            forget()
            answered = {*self.answered, *self.failed}
            self.missing = [member for member in self._asked if member not in answered]

    def _decode(self, message: Message) -> Any:
        wanted = self._wanted
        if wanted in (None, Message):
            return message
        try:
            return decode_payload(message.payload, message.packed, wanted, "reply")
        except DecodeError as err:
            err.may_have_run = True
            raise

    # -- the session's side ----------------------------------------------------------------------------------

    def roster(self, members: list[str]) -> None:
        """Record the members to which a relay dispatched the survey."""
        self._asked += members

    def answer(self, message: Message) -> None:
        """Queue an answer. Its sealed headers name the member."""
        member = (message.headers or {}).get(MEMBER_HEADER, "")
        if member in self._received:
            return  # a relay may repeat a sealed answer
        self._received.add(member)
        self.answered.append(member)
        self._queue.append(message)
        self._wake()

    def fault(self, member: str, error: RemoteError) -> None:
        """Record that a member answered with an error."""
        self.failed[member] = error.detail
        self.errors[member] = error
        self._wake()

    def done(self, lost: list[str], error: IrisError | None) -> None:
        """End the survey: no more answers will arrive. `lost` are members whose relay was lost."""
        self._asked += [member for member in lost if member not in self._asked]
        self._ended = True
        self._error = error
        self._wake()

    def forked(self) -> None:
        """End the survey in the child of a fork; its iteration raises Closed."""
        self._queue.clear()
        self._waiter = None
        self._ended, self._error = True, Closed(f"the survey of {self.cluster!r} {FORKED}")

    def _wake(self) -> None:
        waiter, self._waiter = self._waiter, None
        if waiter is not None and not waiter.done():
            waiter.set_result(None)


def make_survey(
    runtime: Runtime, cluster: str, payload: object, *, timeout: float, headers: Headers | None, wanted: Any, scope: Scope,
    method: str | None,
) -> Survey[Any]:  # fmt: skip
    """Return a survey whose arguments are checked, and whose answers are decoded into `wanted`; see `Client.survey`."""
    address = scoped(cluster, scope)
    if method is not None:
        check_method(method)
    if wanted is not None:
        check_decodable(wanted)
    data, packed = runtime.encode(payload, headers)

    async def start(survey: Survey[Any]) -> Callable[[], None]:
        left_s = inherited_s(cluster, timeout) if HANDLED else None
        until_s = deadline(timeout if left_s is None else left_s)
        pump, session = await runtime.ready(cluster, timeout if left_s is None else left_s)
        pending = session.requests.send(
            Kind.SURVEY, address, runtime.registry.cluster_keys(address)[0], data, headers, packed,
            timeout_ms=milliseconds(seconds_left(until_s)), survey=survey, method=method or "",
        )  # fmt: skip
        pump.touch()

        def forget() -> None:
            session.requests.forget(pending)
            pump.touch()

        return forget

    return Survey(cluster, start, wanted)


def scoped(cluster: str, scope: Scope) -> str:
    """Return the address for a scope: ".:NAME" for "site", else `cluster`. Raises InvalidName or ConfigError."""
    site, name = check_address(cluster)
    if scope == "federation":
        return cluster
    if scope != "site":
        raise ConfigError(f"scope must be 'site' or 'federation', not {scope!r}")
    if site not in ("", HERE):
        raise ConfigError(
            f"scope='site' means this site, but {cluster!r} names another; leave out one of them"
        )
    return f"{HERE}:{name}"
