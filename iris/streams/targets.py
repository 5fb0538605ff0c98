"""Where the appends of a client go: to the log of a stream, or to those of its partitions, once they are known."""

from __future__ import annotations

import asyncio
import functools
import time
from typing import Final

from iris.deadlines import seconds_left
from iris.errors import ConfigError, RequestError, StreamError, StreamUnavailable
from iris.streams.appending import GIVE_UP_S, Appender
from iris.streams.partitions import NO_PARTITIONS, Layout, find_layout
from iris.streams.spreading import Opening, Spread, Target
from iris.streams.stores import Stores

MAX_PRODUCERS: Final = 1024
"""Streams that one client can append to."""
LOOK_S: Final = 5.0
"""Seconds for which a client looks, in the background, for partitions that were added."""


class Targets:
    """The streams that a client appends to."""

    def __init__(self, stores: Stores) -> None:
        self.known: dict[tuple[str, str], Target] = {}
        """(stream name, uuid) -> its appender, or those of its partitions."""
        self._stores = stores
        self._appenders: dict[tuple[str, str], Appender] = {}
        self._looks: dict[tuple[str, str], asyncio.Task[None]] = {}

    async def find(
        self, name: str, uuid: str, partition: int | None, keyed: bool, timeout: float
    ) -> tuple[Target, float]:
        """Return where a message goes, and what is left of `timeout`. It waits until the partitions are known if they
        decide that.

        Raises StreamError; ConfigError if the stream has no such partition.
        """
        target = self.known.get((name, uuid)) or self._open(name, uuid)
        if not keyed and partition is None:
            return target, timeout
        until_s = time.monotonic() + timeout
        try:
            async with asyncio.timeout(timeout):
                if isinstance(target, Opening):
                    target = await target.target()
                has = len(target.layout) if isinstance(target, Spread) else 1
                if partition is not None and partition >= has:  # perhaps it was added
                    await self._look_again(name, uuid)
                    target = self.known.get((name, uuid), target)
        except TimeoutError:
            raise self.not_found(name, timeout) from None
        if partition and not isinstance(target, Spread):
            raise ConfigError(NO_PARTITIONS.format(name=name, partition=partition))
        return target, seconds_left(until_s)

    def not_found(self, name: str, asked: float) -> StreamUnavailable:
        """Return the error of an append that did not find the stream within its timeout of `asked` seconds."""
        cause = self._stores.runtime.away_text(asked, time.monotonic())
        detail = f"it could not be looked up within {asked:g} s{cause}; nothing was sent{self._stores.holders.starting_hint}"
        return StreamUnavailable(name, detail)

    async def finish(self) -> None:
        """Wait until every append has finished."""
        while openings := [one for one in self.known.values() if isinstance(one, Opening)]:
            await asyncio.wait([one.task for one in openings])
        await asyncio.gather(*(appender.finish() for appender in self._appenders.values()))

    def end(self, reason: str) -> None:
        """Stop sending, and fail the pending appends with `reason`."""
        for task in self._looks.values():
            task.cancel()
        for target in self.known.values():
            if isinstance(target, Opening):
                target.end(reason)
        for appender in self._appenders.values():
            appender.end(reason)

    def _appender(self, name: str, uuid: str, *, named: bool) -> Appender:
        appender = self._appenders.get((name, uuid))
        if appender is None:
            if len(self._appenders) >= MAX_PRODUCERS:
                raise StreamError(
                    name,
                    f"this client already appends to {MAX_PRODUCERS} streams or partitions, which is the limit; use another client",
                )
            appender = self._appenders[name, uuid] = Appender(
                self._stores, name, uuid, lambda: self._look(name, uuid), named=named
            )
        return appender

    def _open(self, name: str, uuid: str) -> Opening:
        """Return where the first appends to a stream wait until its partitions are known."""
        self._stores.keys(name)

        def done(found: Appender | Spread | None) -> None:
            if found is None:
                self.known.pop((name, uuid), None)
            else:
                self.known[name, uuid] = found

        opening = self.known[name, uuid] = Opening(name, self._find_target(name, uuid), done)
        return opening

    async def _find_target(self, name: str, uuid: str) -> Appender | Spread:
        layout = await find_layout(self._stores, name, uuid, timeout=GIVE_UP_S)
        if len(layout) == 1:
            return self._appender(name, uuid, named=not uuid)
        return self._spread(layout, name, uuid)

    def _spread(self, layout: Layout, name: str, uuid: str) -> Spread:
        appender = functools.partial(self._appender, named=not uuid)
        return Spread(layout, appender, lambda: self._look(name, uuid))

    def _look(self, name: str, uuid: str) -> None:
        """Look in the background for partitions that were added to a stream."""
        there = isinstance(self.known.get((name, uuid)), Appender | Spread)
        if there and (name, uuid) not in self._looks:
            task = asyncio.create_task(self._look_again(name, uuid), name="iris-append-look")
            self._looks[name, uuid] = task
            task.add_done_callback(lambda _: self._looks.pop((name, uuid), None))

    async def _look_again(self, name: str, uuid: str) -> None:
        target = self.known.get((name, uuid))
        try:
            layout = await find_layout(self._stores, name, uuid, timeout=LOOK_S)
        except (StreamError, RequestError):
            return  # it is away; the appends themselves report that
        if isinstance(target, Spread):
            if len(layout) > len(target.layout):
                target.layout = layout
            await target.revive(self._stores)
        elif len(layout) > 1:
            self.known[name, uuid] = self._spread(layout, name, uuid)
