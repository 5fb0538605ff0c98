"""`iris members`: list the members of a cluster."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from typing import Annotated, Any

import typer

import iris
from iris.cli import options, output
from iris.cli.exits import Exit, complain, run, until_stopped
from iris.client import connect
from iris.errors import IrisError, NoMembers
from iris.wire.frames import MemberInfo
from iris.wire.kinds import Kind
from iris.wire.names import plural, printable


def members(
    cluster: options.Cluster,
    watch: Annotated[
        bool,
        typer.Option(
            "--watch", "-w", help="Print members as they join (+) and leave (-), until Ctrl-C."
        ),
    ] = False,
    timeout: options.Timeout = 5.0,
    json: options.AsJson = False,
    relay: options.RelayPath = None,
) -> None:
    """List the members of a cluster: id, what they serve, keys, relay, program.

    If a member has methods, their number is shown; iris describe names them.
    For other sites only the number of members is known. The exit code is 3 if
    the cluster has no members at all. --watch covers this site, and begins
    with a + line for each present member.

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
        async with connect(relay) as client:
            found = await client.members(cluster, timeout=timeout)
        if json:
            for member in found:
                output.write_json(as_document(member))
            for site, count in found.sites.items():
                output.write_json({"site": site, "members": count})
        elif found:
            _print_table(found)
        for site, count in {} if json else found.sites.items():
            output.write(f"{plural(count, 'member')} in site {printable(site)}\n".encode())
        if found or found.sites:
            return Exit.OK
        complain(f"no members of {cluster}" + _elsewhere(found.others))
        return Exit.NO_MEMBERS

    run(work)


def as_document(member: MemberInfo) -> dict[str, Any]:
    """Return the JSON document of a member."""
    return {
        "member": member.member,
        "serves": served(member),
        "methods": member.methods,
        "keys": [key_id.hex() for key_id in member.key_ids],
        "relay": member.relay,
        "site": member.site,
        "label": member.label,
    }


def served(member: MemberInfo) -> list[str]:
    """Return the kinds of message that a member serves, by the names that `Members.serving` accepts."""
    return [
        "tunnel" if kind == Kind.TUNNEL_OPEN else Kind(kind).name.lower() for kind in member.kinds
    ]


async def hint(client: iris.Client, cluster: str) -> str:
    """Return which kinds the members under our keys serve, as an addition to a NoMembers; "" if there are no
    members.

    Relays of this version say so themselves.
    """
    try:
        found = await client.members(cluster, timeout=1.0)
    except IrisError:  # the original error matters more
        return ""
    kinds = ", ".join(dict.fromkeys(kind for member in found for kind in served(member)))
    if not found:
        return ""
    return f"{cluster} has {plural(len(found), 'member')}, serving: {kinds or 'publications'}"


def says_kinds(detail: str) -> bool:
    """Return whether the text of a NoMembers names what the members serve, as relays of this version do."""
    return "; " in detail


@contextlib.asynccontextmanager
async def hint_at_served(client: iris.Client, cluster: str) -> AsyncIterator[None]:
    """Add `hint` to a NoMembers, so that a verb that no member serves is not mistaken for a wrong name."""
    try:
        yield
    except NoMembers as error:
        served = "" if says_kinds(error.detail) else await hint(client, cluster)
        raise (
            NoMembers(cluster, f"{error.detail}; {served}") if served else error
        ) from error.__cause__


async def _follow(cluster: str, relay: Any, *, as_json: bool) -> None:
    known: dict[str, MemberInfo] = {}
    async with connect(relay) as client:
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
        what = _serves(member)
        line = f"{sign} {member.member}  {what}  {member.label}"
        output.write(printable(line).encode() + b"\n")


def _serves(member: MemberInfo) -> str:
    """Return "request, push (2 methods)"."""
    methods = f" ({plural(member.methods, 'method')})" if member.methods else ""
    return ", ".join(served(member)) + methods


def _print_table(found: iris.Members) -> None:
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for title in ("MEMBER", "SERVES", "KEYS", "SITE", "PROGRAM"):
        table.add_column(title, no_wrap=True)
    for member in found:
        keys = " ".join(key_id.hex()[:8] for key_id in member.key_ids)
        shown = (member.member, _serves(member), keys, member.site, member.label)
        table.add_row(*map(output.cell, shown))
    output.console().print(table)


def _elsewhere(others: dict[str, int]) -> str:
    """Return a hint that members exist under other keys; "" if there are none."""
    if not others:
        return ""
    known = ", ".join(f"{count} under {key}…" for key, count in sorted(others.items()))
    return f" under your keys; members under other keys: {known}; compare `iris key show`"
