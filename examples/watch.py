"""Watch a network from a program: who serves, how fast, and who is slow. `iris top` shows the same to people."""

import asyncio

import iris
from iris.watch import Network, Watch

orders = iris.Service("orders", version="2.1")


@orders.on_request("place")
async def place(order: str) -> str:
    await asyncio.sleep(0.002)
    return f"placed {order}"


def show(network: Network) -> None:
    for cluster in network.clusters:
        print(
            f"{cluster.name}: {cluster.total} member, calls handled: {bool(cluster.handled_rate)}"
        )
        for member in cluster.members:
            quick = member.p99_ms is not None and member.p99_ms < 5000
            print(f"version {member.version}, p99 under 5 s: {quick}, queued: {member.queued}")
    for slow in network.slow:
        print(f"slow: {slow.who} on {slow.host}: {', '.join(slow.why)}")


async def main() -> None:
    async with (
        iris.connect(embedded=True) as client,
        client.serve(orders),
        Watch(client, interval_s=0.2) as watch,  # Watch() connects to this host's relay by itself
    ):
        async for network in watch.updates():
            for number in range(10):
                await client.request("orders", f"{number}", timeout=5.0, method="place")
            if network.clusters and network.clusters[0].handled_rate:
                show(network)
                return


asyncio.run(main())
