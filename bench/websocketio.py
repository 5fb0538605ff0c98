"""The server of python-socketio that `bench/web.py` starts: asyncio, uvicorn, and Redis between server and publishers.

As its documentation recommends: `AsyncServer` as an ASGI application under uvicorn with uvloop and httptools, an
`AsyncRedisManager`, and a room that every browser enters. Without compression, as for the others.
"""

from __future__ import annotations

import argparse

import socketio
import uvicorn
from websessions import TOPIC


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--redis", required=True)
    given = parser.parse_args()
    manager = socketio.AsyncRedisManager(given.redis)
    server = socketio.AsyncServer(async_mode="asgi", client_manager=manager, http_compression=False)

    async def connect(sid: str, environ: object, auth: object) -> None:
        await server.enter_room(sid, TOPIC)

    server.on("connect", connect)
    uvicorn.run(
        socketio.ASGIApp(server), host="127.0.0.1", port=given.port, loop="uvloop", http="httptools", ws="websockets",
        ws_per_message_deflate=False, access_log=False, log_level="warning", backlog=2048,
    )  # fmt: skip


if __name__ == "__main__":
    main()
