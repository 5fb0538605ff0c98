"""`iris ping`: the round trip to each member of a cluster."""

from __future__ import annotations

import msgspec

from iris.cli import options, output
from iris.cli.asking import report
from iris.cli.exits import run
from iris.client import connect


def ping(
    cluster: options.Cluster,
    timeout: options.Timeout = 5.0,
    json: options.AsJson = False,
    relay: options.RelayPath = None,
) -> None:
    """Measure the round trip to each member of a cluster in this site.

    The library of the member answers, not a handler. Members that do not
    answer are named on stderr.

    \b
    Example:
      iris ping orders
    """

    async def work() -> int:
        async with connect(relay) as client:
            found = await client.ping(cluster, timeout=timeout)
        for one in found:
            if json:
                output.write_json(msgspec.to_builtins(one))
            else:
                output.write(f"{one.member} {one.rtt_s * 1000:.2f} ms\n".encode())
        return report(cluster, found)

    run(work)
