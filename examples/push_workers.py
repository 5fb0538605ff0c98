"""Push hands work to one member and expects no reply. What fails is reported, never silently dropped."""

import asyncio

import iris

service = iris.Service("thumbnails", limits=iris.Limits(concurrency=4))
made: list[str] = []


@service.on_push
async def shrink(path: str) -> None:
    await asyncio.sleep(0.01)
    made.append(path)


async def main() -> None:
    async with iris.connect(embedded=True) as client:
        client.on_loss = lambda loss: print("lost:", loss.kind, "to", loss.name, "failed")
        async with client.serve(service):
            for number in range(20):
                await client.push("thumbnails", f"photo-{number}.jpg")
            await client.flush()  # the relay has handed all of them over
        # Leaving finished what the member had accepted.
        print(len(made), "thumbnails")
        await client.push("thumbnails", "too-late.jpg")
        await client.flush()


asyncio.run(main())
