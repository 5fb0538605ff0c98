"""Timeouts and deadlines of calls, and the deadline that a handler passes on to the calls that it makes."""

from __future__ import annotations

import asyncio
import functools
import os
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, Final, ParamSpec, TypeVar

from iris.checks import check_number
from iris.errors import ConfigError, RequestError, RequestTimeout, with_deadline

LONGEST_MS: Final = 0xFFFFFFFF
LONGEST_S: Final = LONGEST_MS / 1000
P = ParamSpec("P")
T = TypeVar("T")

HANDLED: Final[dict[asyncio.Task[Any] | int, int]] = {}
"""Deadlines of the requests that are being handled, in µs of CLOCK_MONOTONIC: the handler's task, or the number of
its thread -> deadline.

A table by task, because a context variable would be copied into every task that a handler starts, and most of
these outlive the request.
"""


os.register_at_fork(after_in_child=HANDLED.clear)  # a child may live on after the request


def handled_us() -> int:
    """Return the deadline of the request that the calling task or thread handles; 0 if it handles none."""
    try:
        owner: asyncio.Task[Any] | int | None = asyncio.current_task()
    except RuntimeError:  # a thread without an event loop
        owner = threading.get_ident()
    return HANDLED.get(owner, 0) if owner is not None else 0


def inherited_s(cluster: str, timeout: float) -> float | None:
    """Return the seconds left of the request that the caller handles, if that is less than `timeout`; else None.

    Raises RequestTimeout if nothing is left. Call it only if there are any in `HANDLED`, to save the time.
    """
    until_us = handled_us()
    if not until_us:
        return None
    left_s = until_us / 1e6 - time.monotonic()
    if left_s >= timeout:
        return None
    if left_s <= 0:
        raise not_sent(cluster)
    return round(left_s, 3) or 0.001


def not_sent(cluster: str) -> RequestTimeout:
    """Return the error of a call for which the request that its caller handles leaves no time."""
    late = RequestTimeout(
        cluster, "not sent: the deadline of the request that this handler serves has passed"
    )
    late.may_have_run = False
    return late


def explain_cut(error: RequestError, timeout: float) -> None:
    """Add to the error of a call that an inherited deadline cut short that it was cut from `timeout` seconds."""
    text = f"; the timeout of {timeout:g} s was cut to what was left of the request that this handler serves"
    error.detail += text
    error.args = (f"{error.args[0]}{text}",)


def carried(function: Callable[P, T]) -> Callable[P, T]:
    """Return `function` for another thread, where it has the deadline of the task that calls `carried`."""
    until_us = handled_us()
    if not until_us:
        return function

    @functools.wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> T:
        thread = threading.get_ident()
        HANDLED[thread] = until_us
        try:
            return function(*args, **kwargs)
        finally:
            del HANDLED[thread]

    return run


async def carried_on(work: Coroutine[Any, Any, T], until_us: int) -> T:
    """Await `work` in this task with the deadline of a request that another thread handles."""
    task = asyncio.current_task()
    assert task is not None
    HANDLED[task] = until_us
    try:
        return await work
    finally:
        del HANDLED[task]


def deadline(timeout: float) -> float:
    """Return the monotonic time at which a call with this timeout (s) ends.

    Waiting for a relay counts. Raises ConfigError.
    """
    milliseconds(timeout)
    return time.monotonic() + timeout


def seconds_left(until_s: float) -> float:
    """Return the seconds until `until_s`, at least 0.001: a call that just met its deadline may go on."""
    return max(0.001, until_s - time.monotonic())


def milliseconds(timeout: float) -> int:
    """Return a timeout in whole milliseconds, as it is sent: 1 to 2^32 - 1.

    Raises ConfigError if it is not above 0.
    """
    try:
        if not timeout > 0:
            raise ConfigError(f"timeout must be above 0 s, not {timeout}")
    except TypeError:
        check_number("timeout", timeout)
        raise
    return round(timeout * 1000) or 1 if timeout < LONGEST_S else LONGEST_MS


async def within(waiter: Awaitable[Any], timeout: float, text: str) -> Any:
    """Await an answer of the relay; raises RequestTimeout with `text` ("the relay did not ...") after `timeout` s."""
    try:
        async with asyncio.timeout(timeout):
            return await waiter
    except TimeoutError:
        late = RequestTimeout("relay", f"{text} within {timeout:g} s")
        raise with_deadline(late, text, timeout) from None
