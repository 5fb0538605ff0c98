"""`iris members`: who is in a cluster."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from typing import Annotated, Any

import typer

import iris
from iris.cli import options, output
from iris.cli.exits import Exit, complain, run, until_stopped
from iris.errors import IrisError, NoMembers
from iris.wire.frames import MemberInfo
from iris.wire.kinds import Kind
from iris.wire.names import printable


def members(
    cluster: options.Cluster,
    watch: Annotated[
        bool, typer.Option("--watch", "-w", help="Follow who comes (+) and goes (-) until Ctrl-C.")
    ] = False,
    timeout: options.Timeout = 5.0,
    json: options.AsJson = False,
    relay: options.RelayPath = None,
) -> None:
    """List the members of a cluster: id, what they serve, keys, relay, program.

    Those of other sites are known by their number. Ends with exit code 3 if
    there is none anywhere. With --watch, every member of this site that is
    there at the start counts as one that comes.

    \b
    Examples:
      iris members databases
      iris members databases --json | jq -r .member
      iris members databases --watch
    """

    async def work() -> int:
        if watch:
            await until_stopped(_follow(cluster, relay, as_json=json))
            return Exit.OK
        async with iris.connect(relay) as client:
            found = await client.members(cluster, timeout=timeout)
        if json:
            for member in found:
                output.write_json(as_document(member))
            for site, count in found.sites.items():
                output.write_json({"site": site, "members": count})
        elif found:
            _print_table(found)
        for site, count in {} if json else found.sites.items():
            output.write(f"{count} in the site {printable(site)}\n".encode())
        if found or found.sites:
            return Exit.OK
        complain(f"no members of {cluster}" + _elsewhere(found.others))
        return Exit.NO_MEMBERS

    run(work)


def as_document(member: MemberInfo) -> dict[str, Any]:
    """Return what `--json` shows of a member."""
    return {
        "member": member.member,
        "serves": served(member),
        "keys": [key_id.hex() for key_id in member.key_ids],
        "relay": member.relay,
        "site": member.site,
        "label": member.label,
    }


def served(member: MemberInfo) -> list[str]:
    """Return the names of the kinds that a member serves, as `Members.serving` takes them."""
    return [
        "tunnel" if kind == Kind.TUNNEL_OPEN else Kind(kind).name.lower() for kind in member.kinds
    ]


async def takes(client: iris.Client, cluster: str) -> str:
    """Return what the members under our keys take, to be added to "no members … take it"; "" if there are none."""
    try:
        found = await client.members(cluster, timeout=1.0)
    except IrisError:  # it is only a hint
        return ""
    kinds = ", ".join(dict.fromkeys(kind for member in found for kind in served(member)))
    count = f"{len(found)} member{'s' if len(found) > 1 else ''}"
    return f"{cluster} has {count}, taking: {kinds or 'publications'}" if found else ""


@contextlib.asynccontextmanager
async def saying_what_they_take(client: iris.Client, cluster: str) -> AsyncIterator[None]:
    """Add `takes` to a NoMembers: a wrong verb reads like a wrong name without it."""
    try:
        yield
    except NoMembers as error:
        hint = await takes(client, cluster)
        raise NoMembers(cluster, f"{error.detail}; {hint}") if hint else error from error.__cause__


async def _follow(cluster: str, relay: Any, *, as_json: bool) -> None:
    known: dict[str, MemberInfo] = {}
    async with iris.connect(relay) as client:
        async for found in client.watch_members(cluster):
            now = {member.member: member for member in found}
            for number, member in known.items():
                if number not in now:
                    _print_change("-", member, as_json=as_json)
            for number, member in now.items():
                if number not in known:
                    _print_change("+", member, as_json=as_json)
            known = now


def _print_change(sign: str, member: MemberInfo, *, as_json: bool) -> None:
    if as_json:
        output.write_json({"change": sign, **as_document(member)})
    else:
        what = ", ".join(served(member))
        line = f"{sign} {member.member}  {what}  {member.label}"
        output.write(printable(line).encode() + b"\n")


def _print_table(found: iris.Members) -> None:
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for title in ("MEMBER", "SERVES", "KEYS", "SITE", "PROGRAM"):
        table.add_column(title, no_wrap=True)
    for member in found:
        keys = " ".join(key_id.hex()[:8] for key_id in member.key_ids)
        shown = (member.member, ", ".join(served(member)), keys, member.site, member.label)
        table.add_row(*map(output.cell, shown))
    output.console().print(table)


def _elsewhere(others: dict[str, int]) -> str:
    """Return what a wrong key looks like."""
    if not others:
        return ""
    there = ", ".join(f"{count} under {key}…" for key, count in sorted(others.items()))
    return f" under your keys; there are {there} (compare with `iris key show`)"
