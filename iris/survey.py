"""Surveys: an async iterator over the answers of all members, which afterwards lists those that did not answer."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from typing import Any, Generic, Literal, TypeVar

from iris.core.bundle import Headers
from iris.core.message import MEMBER_HEADER, Message, check_decodable, decode_payload
from iris.deadlines import HANDLED, deadline, inherited_s, milliseconds, seconds_left
from iris.errors import ConfigError, DecodeError, IrisError, RemoteError
from iris.iterating import Iteration, Waiters
from iris.misuse import AsyncOnly
from iris.one_process import OneProcess
from iris.runtime import Runtime
from iris.wire.kinds import HERE, Kind
from iris.wire.names import check_address, check_method

T = TypeVar("T")
Scope = Literal["site", "federation"]
"""Range of a survey or broadcast: the members of this site, or of all sites."""


class Survey(OneProcess, AsyncOnly, Generic[T]):
    """A survey, made by `Client.survey`. It is sent when the iteration begins.

    After the iteration:

    * `answered`: ids of the members that answered
    * `failed`: members that answered with an error: id -> text of the error
    * `errors`: the same errors with their codes and details: id -> RemoteError
    * `missing`: ids of the members that were asked and did not answer in time
    """

    _right_use = "async for answer in client.survey(...):"

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
        self._waiters = Waiters()
        self._ended = False
        self._error: IrisError | None = None

    def __aiter__(self) -> Iteration[T]:
        return _Answers(self, named=False)

    def items(self) -> Iteration[tuple[str, T]]:
        """Iterate over (id of the member, its answer): `async for member, answer in client.survey(...).items()`."""
        return _Answers(self, named=True)

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
        self._waiters.wake()

    def fault(self, member: str, error: RemoteError) -> None:
        """Record that a member answered with an error."""
        self.failed[member] = error.detail
        self.errors[member] = error
        self._waiters.wake()

    def done(self, lost: list[str], error: IrisError | None) -> None:
        """End the survey: no more answers will arrive. `lost` are members whose relay was lost."""
        self._asked += [member for member in lost if member not in self._asked]
        self._ended = True
        self._error = error
        self._waiters.wake()


class _Answers(Iteration[Any]):
    """Iterates over the answers to a survey, which is sent when this begins."""

    def __init__(self, survey: Survey[Any], *, named: bool) -> None:
        self._survey = survey
        self._named = named
        self._sending = asyncio.Lock()
        self._forget: Callable[[], None] | None = None
        """Tells the relay that nobody waits any more; None until the survey is sent."""

    @property
    def _of(self) -> str:
        return self._survey.cluster

    async def __anext__(self) -> Any:
        self._begun()
        survey = self._survey
        try:
            async with self._sending:
                if self._forget is None:
                    self._forget = await survey._start(survey)
            while not survey._queue and not survey._ended:
                await survey._waiters.wait()
                self._begun()
            if survey._queue:
                message = survey._queue.popleft()
                answer = survey._decode(message)
                member = (message.headers or {}).get(MEMBER_HEADER, "")
                return (member, answer) if self._named else answer
            raise survey._error or StopAsyncIteration
        except asyncio.CancelledError:
            raise
        except BaseException:
            self._end()
            raise

    def _release(self) -> None:
        if self._forget is not None:
            self._forget()
            survey = self._survey
            survey._waiters.wake()
            answered = {*survey.answered, *survey.failed}
            survey.missing = [member for member in survey._asked if member not in answered]


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

    until_s = 0.0

    async def start(survey: Survey[Any]) -> Callable[[], None]:
        nonlocal until_s
        left_s = seconds_left(until_s)
        if not until_s:  # else an earlier wait for a relay was cancelled
            left_s = (inherited_s(cluster, timeout) if HANDLED else None) or timeout
            until_s = deadline(left_s)
        pump, session = await runtime.ready(cluster, left_s)
        pending = session.requests.send(
            Kind.SURVEY, address, runtime.registry.cluster_keys(address)[0], data, headers, packed,
            timeout_ms=milliseconds(seconds_left(until_s)), survey=survey, method=method or "",
        )  # fmt: skip
        pump.touch()
        until_s = 0.0

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
