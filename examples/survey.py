"""A survey asks every member. It says who answered, who failed and who did not answer in time."""

import asyncio

import iris


def cache(name: str, entries: int) -> iris.Service:
    service = iris.Service("caches")

    @service.on_survey
    async def size(question: str) -> dict[str, object]:
        if name == "slow":
            await asyncio.sleep(60)
        if name == "broken":
            raise OSError("disk on fire")
        return {"name": name, "entries": entries}

    return service


async def main() -> None:
    async with (
        iris.connect(embedded=True) as client,
        client.serve(cache("a", 120)),
        client.serve(cache("b", 45)),
        client.serve(cache("broken", 0)),
        client.serve(cache("slow", 0)) as slow,
    ):
        answers = client.survey("caches", "how many?", timeout=0.3, type=dict)
        total = 0
        async for answer in answers:
            print(answer)
            total += answer["entries"]
        print(f"{total} entries in {len(answers.answered)} caches")
        print("failed:", list(answers.failed.values()))
        print(
            "missing:",
            len(answers.missing),
            "(the slow one)" if answers.missing == [slow.member_id] else "",
        )
        await slow.stop()


asyncio.run(main())
