"""A handler may answer later than it returns: take the request, collect a batch, answer all of them at once."""

import asyncio

import iris

service = iris.Service("squares")
waiting: list[tuple[int, iris.Deferred]] = []


@service.on_request
def enqueue(request: iris.Request) -> None:
    waiting.append((request.decode(int), request.defer()))
    if len(waiting) == 3:
        batch = waiting.copy()
        waiting.clear()
        print("a batch of", len(batch))
        for number, deferred in batch:
            if number < 0:
                deferred.fail("negative numbers are not for squaring")
            else:
                deferred.reply(number * number)


async def main() -> None:
    async with iris.connect(embedded=True) as client, client.serve(service):
        results = await asyncio.gather(
            *(client.request("squares", number, timeout=1.0) for number in (3, 4, -5)),
            return_exceptions=True,
        )
        for result in results:
            print(result)


asyncio.run(main())
