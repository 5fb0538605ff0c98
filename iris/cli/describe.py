"""`iris describe`: what the members of a cluster are, and what their handlers have done."""

from __future__ import annotations

from typing import Any

import msgspec

import iris
from iris.cli import options, output
from iris.cli.asking import report
from iris.cli.exits import run
from iris.client import connect
from iris.wire.names import printable


def describe(
    cluster: options.Cluster,
    timeout: options.Timeout = 5.0,
    json: options.AsJson = False,
    relay: options.RelayPath = None,
) -> None:
    """Ask each member of a cluster what it is: versions, handlers and their types, counts and times.

    Members of other sites cannot be asked. Members that do not answer are
    named on stderr. --json also has the JSON Schema of each handler.

    \b
    Examples:
      iris describe orders
      iris describe orders --json | jq '.handlers[] | select(.failed > 0)'
    """

    async def work() -> int:
        async with connect(relay) as client:
            found = await client.describe(cluster, timeout=timeout)
        for one in found:
            if json:
                output.write_json(msgspec.to_builtins(one))
            else:
                output.write(_as_text(one).encode())
        return report(cluster, found)

    run(work)


def _as_text(one: iris.Description) -> str:
    title = " ".join(word for word in (one.service, one.version) if word)
    lines = [
        f"member {one.member}: {title}, up {one.uptime_s:.0f} s, iris {one.iris}, {one.running} running, {one.queued} queued"
    ]
    lines += [f"  {line}" for line in one.description.splitlines()]
    for each in one.handlers:
        result = f" -> {each.result}" if each.result else ""
        lines.append(f"  {each.kind} {each.name or '(no name)'}({each.argument}){result}")
        if each.doc:
            lines.append(f"    {each.doc.splitlines()[0]}")
        if each.counted:
            lines.append(f"    {_counts(each)}")
    return "".join(f"{printable(line)}\n" for line in lines)


def _counts(each: iris.HandlerInfo) -> str:
    counts: dict[str, Any] = {
        "handled": each.handled, "failed": each.failed, "refused": each.refused, "expired": each.expired,
    }  # fmt: skip
    times = f"; mean {each.mean_ms:.3f} ms, max {each.max_ms:.3f} ms" if each.timed else ""
    return ", ".join(f"{count} {name}" for name, count in counts.items()) + times
