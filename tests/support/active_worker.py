"""A replica for tests: `python active_worker.py SOCKET`, where each message is settled when a line comes in.

It says "active" and "inactive", the payload of each message, and how it ended.
"""

from __future__ import annotations

import asyncio
import sys

import iris
from iris.crypto.keys import ClusterKey
from iris.errors import NotActive

KEY = ClusterKey(bytes(range(32)))
"""That of `support.relays`."""
STREAM, CONSUMER = "orders", "ledger"


def say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


async def work(socket: str) -> None:
    loop = asyncio.get_running_loop()
    async with iris.connect(socket, keyring=iris.Keyring.single(KEY)) as client:
        consumer = client.streams.consumer(
            STREAM, CONSUMER, prefetch=1, patience=60.0, on_active=lambda is_: say("active" if is_ else "inactive")
        )  # fmt: skip
        async with consumer as messages:
            async for message in messages:
                say(message.payload.decode())
                await loop.run_in_executor(None, sys.stdin.readline)
                message.ack()
                await messages.flush()


if __name__ == "__main__":
    try:
        asyncio.run(work(sys.argv[1]))
    except NotActive as err:
        say(f"NotActive: {err}")
