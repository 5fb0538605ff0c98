"""The twin of streams in a bucket: bare PUTs of objects of one size, without a store: `python -m streams.puts JSON`.

Objects are created with `If-None-Match: *`, by obstore. For a directory, whose files obstore does not sync, also by
what Iris does there: write, fsync, link, fsync of the directory.
"""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import sys
import time
from array import array
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, Final

import harness
import uvloop
from roles import encoded

from relay.store.bucket.directory import Directory

KINDS: Final = 8
"""Number of different contents, made before the clock runs."""
Create = Callable[[str, bytes], Awaitable[Any]]


def bare(url: str, synced: bool) -> Create:
    """Return what creates an object."""
    import obstore
    from obstore.store import from_url

    if url.startswith("file://"):
        root = Path(url.removeprefix("file://"))
        root.mkdir(exist_ok=True)
        if synced:
            return Directory(root).create
        store: Any = obstore.store.LocalStore(root)
    else:
        store = from_url(url, client_options={"allow_http": True}, retry_config={"max_retries": 0})  # type: ignore[call-overload]  # of any service
    return lambda key, data: obstore.put_async(store, key, data, mode="create", use_multipart=False)


async def put(url: str, size: int, inflight: int, seconds: float, synced: bool) -> harness.Result:
    """Create objects of `size` bytes, `inflight` at a time."""
    create = bare(url, synced)
    contents = [os.urandom(size) for _ in range(KINDS)]
    prefix = f"twin/{secrets.token_hex(8)}"
    samples_ns = array("q")
    await create(f"{prefix}/first", contents[0])
    begin_ns = time.monotonic_ns()
    end_ns = begin_ns + int(seconds * 1e9)
    number = 0

    async def work() -> None:
        nonlocal number
        while (since_ns := time.monotonic_ns()) < end_ns:
            number += 1
            await create(f"{prefix}/{number:012d}", contents[number % KINDS])
            samples_ns.append(time.monotonic_ns() - since_ns)

    async with asyncio.TaskGroup() as group:
        for _ in range(inflight):
            group.create_task(work())
    spent_s = (time.monotonic_ns() - begin_ns) / 1e9
    return {
        "puts": number,
        "size": size,
        "inflight": inflight,
        "mb_s": number * size / spent_s / 1e6,
        "latency": encoded(samples_ns),
    }


def main() -> None:
    harness.report("puts", uvloop.run(put(**json.loads(sys.argv[1]))))


if __name__ == "__main__":
    main()
