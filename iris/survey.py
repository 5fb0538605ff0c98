"""A survey: an async iterator over the answers of all members, which afterwards lists those that did not answer."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from typing import Any, Generic, TypeVar

from iris.core.message import MEMBER_HEADER, Message, decode_payload
from iris.errors import DecodeError, IrisError, RemoteError

T = TypeVar("T")


class Survey(Generic[T]):
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

    def _wake(self) -> None:
        waiter, self._waiter = self._waiter, None
        if waiter is not None and not waiter.done():
            waiter.set_result(None)
