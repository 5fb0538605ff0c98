"""Which stores exist, and which of them hold a stream, as the local relay knows it."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Sequence
from typing import Final

import msgspec

from iris.deadlines import seconds_left
from iris.errors import ConnectionLost, RequestTimeout
from iris.runtime import Runtime
from iris.wire import frames
from iris.wire.kinds import NO_KEY, STORES

HOLDERS_S: Final = 5.0
"""Seconds in which a relay must answer who holds a stream. After that the question or the relay counts as lost."""
LOOK_S: Final = 1.0
"""Seconds in which a relay must answer which stores exist, for the text of an error."""
_UUID: Final = re.compile("[0-9a-f]{32}")


class Holder(msgspec.Struct, frozen=True):
    """A store that holds a stream of the name asked for; `uuid` is the log's, in hex."""

    uuid: str
    key_ids: list[bytes]
    member: str


class Holders:
    """Asks the relay which stores there are."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._starting: list[str] = []
        """Hosts where a store was starting when the relay last answered."""

    async def find(self, name: str, key_ids: Sequence[bytes], *, timeout: float) -> list[Holder]:
        """Return the stores that hold a stream of this name, or of this uuid, under one of these keys.

        Raises ConnectionLost or RequestTimeout.
        """
        until_s = time.monotonic() + timeout
        _, session = await self._runtime.ready(name, timeout)
        for key_id in key_ids:
            if key_id != NO_KEY and (key := self._runtime.keyring.by_id(key_id)) is not None:
                session.out.prove(key)
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        found: list[frames.MemberInfo] = []
        starting: list[str] = []

        def receive(membership: frames.Membership) -> None:
            found.extend(membership.joined)
            starting.extend(membership.starting)
            if not membership.more and not done.done():
                done.set_result(None)

        number = session.watch(name, list(key_ids), receive, stay=False, streams=True)
        self._runtime.touch()
        try:
            async with asyncio.timeout(wait_s := min(HOLDERS_S, seconds_left(until_s))):
                await done
        except TimeoutError:
            asked = "which stores exist" if name == STORES else "which store holds it"
            detail = f"the relay did not say within {wait_s:.3g} s {asked}"
            raise ConnectionLost(name, detail, may_have_run=False) from None
        finally:
            session.unwatch(number)
        self._starting = starting
        if _UUID.fullmatch(name):  # the tag of a uuid is the stream's name
            return [Holder(name, info.key_ids, info.member) for info in found]
        return [
            Holder(info.tag, info.key_ids, info.member)
            for info in found
            if _UUID.fullmatch(info.tag)
        ]

    async def every(self, *, timeout: float) -> list[Holder]:
        """Return all stores of this site; `uuid` is the store's. Raises as `find`."""
        return await self.find(STORES, [NO_KEY], timeout=timeout)

    async def may_exist(self) -> bool:
        """Return whether this site may have a store, or one that is starting."""
        try:
            return bool(await self.every(timeout=LOOK_S) or self._starting)
        except (ConnectionLost, RequestTimeout):
            return True  # nothing is known

    def found(self) -> None:
        """Note that a stream was found, so no call waits for a store that is starting."""
        self._starting = []

    @property
    def starting_hint(self) -> str:
        """Text to add to the error of an unanswered call: which stores are still starting. May be empty."""
        where = ", ".join(self._starting)
        return f"; a store is still starting: {where}" if where else ""
