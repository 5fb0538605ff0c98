"""A worker of a consumer, as a process that tests can kill: `python stream_worker.py SOCKET STREAM
CONSUMER FILE`.

It handles each message by writing a line "offset number deliveries" to its file, and then acknowledges it. It refuses
messages that say "poison".
"""

from __future__ import annotations

import asyncio
import os
import sys

from support.stores import KEY

import iris

STREAM, CONSUMER = "orders", "work"
MAX_DELIVER = 3


async def work(socket: str, file: str) -> None:
    """Handle messages until the process is ended."""
    handled = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    settings = {"shared": True, "ack_timeout": 1.0, "max_deliver": MAX_DELIVER, "prefetch": 20}
    async with (
        iris.connect(socket, keyring=iris.Keyring.single(KEY)) as client,
        client.streams.consumer(STREAM, CONSUMER, **settings) as worker,
    ):
        async for message in worker:
            if message.payload.startswith(b"poison"):
                worker.nack(message, reason="poison")
                continue
            line = b"%d %s %d\n" % (message.offset, message.payload, message.deliveries)
            os.write(handled, line)
            worker.ack(message)


if __name__ == "__main__":
    asyncio.run(work(sys.argv[1], sys.argv[2]))
