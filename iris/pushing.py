"""A push whose sender waits until the relay has routed it, for a bridge that must answer for each push by itself."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

from iris.core.bundle import Headers
from iris.deadlines import deadline, milliseconds, seconds_left
from iris.errors import ConnectionLost, RequestError
from iris.wire import frames
from iris.wire.names import check_method

if TYPE_CHECKING:
    from iris.runtime import Runtime


async def push_routed(
    runtime: Runtime,
    cluster: str,
    payload: object,
    *,
    timeout: float,
    headers: Headers | None,
    method: str | None,
) -> None:
    """Send a push as `Client.push` does, and return when the relay has routed it. A failure known by then is raised.

    One that becomes known later is reported to `on_loss` and in `losses`, as every other.

    Raises:
        RequestError: NoMembers, Overloaded or RelayError: nothing has run. ConnectionLost or RequestTimeout, if the
            relay did not answer: `may_have_run` says whether the push may still run.
        IrisError: as `Client.push`; nothing was sent.
    """
    if method is not None:
        check_method(method)
    until_s = deadline(timeout)
    pump, session = await runtime.ready(cluster, timeout)
    data, packed = runtime.encode(payload, headers)
    key = runtime.registry.cluster_keys(cluster)[0]
    failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    routed: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
    hop = session.requests.push(
        cluster, key, data, headers, packed, milliseconds(seconds_left(until_s)), "", method or ""
    )
    session.requests.senders[hop] = failed
    try:
        session.flush()
        session.ask(frames.Ping, routed)
        pump.touch()
        try:
            await runtime.answered(routed, "the relay did not answer", timeout, until_s)
        except RequestError as err:
            if not failed.done():
                raise ConnectionLost(cluster, f"it is not known what became of it: {err}") from err
        if failed.done():
            failed.result()
    finally:
        session.requests.senders.pop(hop, None)
        if failed.done():
            failed.exception()  # retrieved, if it was not raised
