"""A call to one member: each key lives at one member of the cluster, and the caller knows at which."""

import asyncio

import iris


def store() -> iris.Service:
    service = iris.Service("counters")
    counts: dict[str, int] = {}

    @service.on_request
    def add(key: str) -> int:
        counts[key] = counts.get(key, 0) + 1
        return counts[key]

    return service


async def main() -> None:
    async with (
        iris.connect(embedded=True) as client,
        client.serve(store()),
        client.serve(store()) as second,
    ):
        members = await client.wait_for_members("counters", 2, timeout=1.0)
        for key in ("anna", "bert", "anna", "carl", "anna"):
            owner = members[len(key) * ord(key[0]) % len(members)].member
            count = await client.request("counters", key, timeout=1.0, member=owner, type=int)
            print(f"{key}: {count}")
    async with iris.connect(embedded=True) as client, client.serve(store()):
        try:
            await client.request("counters", "anna", timeout=1.0, member=second.member_id)
        except iris.NoMembers as err:
            print("has left:", second.member_id in str(err), "may have run:", err.may_have_run)


asyncio.run(main())
