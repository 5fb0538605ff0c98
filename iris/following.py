"""Follows the members of a cluster: the work behind `Client.members`, `watch_members` and `wait_for_members`."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator

from iris.checks import check_whole
from iris.deadlines import deadline
from iris.errors import RequestTimeout
from iris.iterating import Iteration
from iris.membership import Members, Watcher
from iris.runtime import Runtime
from iris.wire.names import plural


class MembersWatch(Iteration[Members]):
    """Iterates over the members of a cluster: the list now, then the list after each change."""

    def __init__(self, runtime: Runtime, cluster: str) -> None:
        self._runtime = runtime
        self._cluster = cluster
        self._watcher: Watcher | None = None
        self._listed = False

    @property
    def _of(self) -> str:
        return self._cluster

    async def __anext__(self) -> Members:
        self._begun()
        try:
            watcher = self._watcher
            if watcher is None:
                watcher = self._watcher = _follow(self._runtime, self._cluster)
            if self._listed:
                await watcher.changed()
            else:
                await watcher.first()
                self._listed = True
            if watcher.ended:
                raise StopAsyncIteration
            return watcher.members()
        except asyncio.CancelledError:
            raise
        except BaseException:
            self._end()
            raise

    def _release(self) -> None:
        if self._watcher is not None:
            self._watcher.end()
            _leave(self._runtime, self._watcher)


async def wait_for_members(runtime: Runtime, cluster: str, count: int, timeout: float) -> Members:
    """Wait until a cluster has at least `count` members in this site, and return them. Raises RequestTimeout."""
    check_whole("count", count, 0)
    until_s = deadline(timeout)
    listed = False
    with _watching(runtime, cluster) as watcher:
        try:
            async with asyncio.timeout(timeout):
                await watcher.first()
                listed = True
                while len(watcher.members()) < count:
                    await watcher.changed()
                    runtime.attached()
        except TimeoutError:
            found = len(watcher.members())
            text = f"the cluster has {found} of {plural(count, 'member')} after {timeout:g} s"
            if not listed:
                text = f"the relay did not list the members within {timeout:g} s"
            text += runtime.away_text(timeout, until_s)
            raise RequestTimeout(cluster, text) from None
        return watcher.members()


@contextlib.contextmanager
def _watching(runtime: Runtime, cluster: str) -> Iterator[Watcher]:
    """Follow the members of a cluster inside the block."""
    watcher = _follow(runtime, cluster)
    try:
        yield watcher
    finally:
        _leave(runtime, watcher)


def _follow(runtime: Runtime, cluster: str) -> Watcher:
    attachment, registry = runtime.attached(), runtime.registry
    watcher = Watcher(cluster, registry.cluster_keys(cluster))
    registry.watchers.append(watcher)
    pump = attachment.calling()
    if pump is not None:
        watcher.attach(pump.session)
        attachment.touch()
    return watcher


def _leave(runtime: Runtime, watcher: Watcher) -> None:
    runtime.registry.watchers.remove(watcher)
    watcher.detach()
    runtime.touch()
