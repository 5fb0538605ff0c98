"""See what goes wrong: the log with plain `logging`, losses as they are reported, and a client's counters.

Run it with no relay: it brings its own.
"""

from __future__ import annotations

import asyncio
import logging

import iris

service = iris.Service("thumbnails")


@service.on_request
async def shrink(photo: bytes) -> bytes:
    if not photo:
        raise ValueError("the photo is empty")
    return photo[:10]


@service.on_push
async def archive(photo: bytes) -> None:
    raise OSError(
        "the disk is full"
    )  # nobody waits for a push, so the member's log is where this is seen


def on_loss(loss: iris.Loss) -> None:
    print(f"lost {loss.kind} {loss.name}: {loss.count} ({loss.cause})")


async def main() -> None:
    logging.basicConfig(level=logging.INFO)  # all that is needed to read the log
    async with iris.connect(embedded=True) as client, client.serve(service):
        client.on_loss = on_loss
        for photo in (b"0123456789abc", b""):
            try:
                print("shrunk to", await client.request("thumbnails", photo, timeout=5.0))
            except iris.RequestError as error:
                print(f"{type(error).__name__} (may have run: {error.may_have_run}): {error}")
        await client.push("thumbnails", b"photo")
        await client.push("nobody", b"photo")  # reported to on_loss
        await client.broadcast("nobody", b"photo")  # so is this
        await client.flush()
        stats = client.stats()
        print(
            f"sent {stats.sent_messages} messages, {stats.losses} losses, {stats.failed_handlers} failed handlers"
        )


if __name__ == "__main__":
    asyncio.run(main())
