"""A tunnel is an ordered, two-way stream of messages with one member. The slower side sets the pace."""

import asyncio

import iris

service = iris.Service("archive")


@service.on_tunnel
async def restore(tunnel: iris.Tunnel) -> None:
    name = tunnel.headers["name"]
    async for block in tunnel:  # ends when the other side finishes
        await tunnel.send(f"{name} {int(block)}: {'x' * 20}")
    await tunnel.send(b"\0" * 5_000_000)  # a message may be of any size
    # Returning closes the tunnel; what was sent still arrives.


async def main() -> None:
    async with (
        iris.connect(embedded=True) as client,
        client.serve(service),
        client.tunnel("archive", timeout=1.0, headers={"name": "block"}) as tunnel,
    ):
        for number in range(3):
            await tunnel.send(str(number))
        await tunnel.finish()  # half-close: no more from here, but still listening
        for _ in range(3):
            print((await tunnel.recv()).decode())
        size = 0
        async for chunk in tunnel.recv_chunks():  # a large message, piece by piece
            size += len(chunk)
        print(f"then {size:,} bytes in one message")
        try:
            await tunnel.recv()
        except iris.EndOfTunnel:
            print("and that was all")


asyncio.run(main())
