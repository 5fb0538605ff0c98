"""`iris federation`: make the key of this site, and show the other sites that the relay of this host knows."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any

import typer

import iris
from iris import keyfiles
from iris.cli import options, output
from iris.cli.exits import Exit, complain, run
from iris.client import connect
from iris.wire.names import printable
from iris.wire.texts import cleaned

app = typer.Typer(
    name="federation", no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, help="""Connect sites, each a network of relays, through gateways.

    Each site makes a key and gives its fingerprint to the others. A gateway is
    a relay that is started with --gateway or --peer-site.

    \b
    Examples:
      iris federation key eu.toml
      iris relay --site eu --site-key eu.toml --gateway tls://0.0.0.0:7440 \\
          --peer-site us=tls://gw.us.example:7440#FINGERPRINT
      iris federation list
      iris federation ping
    """,
)  # fmt: skip


@app.command()
def key(
    file: Annotated[
        Path, typer.Argument(metavar="FILE", help="Key file. If it does not exist, it is created with mode 0600.")
    ],
    json: options.AsJson = False,
) -> None:  # fmt: skip
    """Print the fingerprint of this site's key, which the other sites pin. Makes the key if FILE does not exist.

    Only the gateways of this site need the file (iris relay --site-key).
    Anyone who has it can pose as this site. The fingerprint is not secret, but
    must reach the other sites unchanged. Before you change the key, let them
    pin the new fingerprint beside the old one.

    \b
    Examples:
      iris federation key eu.toml
      iris federation key eu.toml --json | jq -r .fingerprint
    """

    new = not os.path.lexists(file)

    async def work() -> int:
        site_key = keyfiles.create_site_key(file) if new else keyfiles.load_site_key(file)
        if json:
            output.write_json({"file": str(file), "fingerprint": site_key.fingerprint, "new": new})
        else:
            output.write(site_key.fingerprint.encode() + b"\n")
            if new:
                complain(f"created {file}; give it to the gateways of this site only")
        return Exit.OK

    run(work)


@app.command(name="list")
def list_(
    timeout: options.Timeout = 5.0,
    json: options.AsJson = False,
    relay: options.RelayPath = None,
) -> None:
    """Show the other sites: cost, round trip, clusters, topics, and the connections to them.

    Only a gateway of this site knows which sites should be linked and are not,
    and which peers it refused. Run it on a gateway's host to see these.

    \b
    Examples:
      iris federation list
      iris federation list --json | jq -r 'select(.linked | not) | .site'
    """

    async def work() -> int:
        report = await _report(relay, timeout)
        sites = _sites(report)
        if json:
            for site in sites:
                output.write_json(site)
            return Exit.OK
        _print_table(cleaned(report), cleaned(sites))
        return Exit.OK

    run(work)


@app.command()
def ping(
    site: Annotated[
        list[str] | None,
        typer.Argument(metavar="SITE", help="Sites to show. Default: all.", show_default=False),
    ] = None,
    timeout: options.Timeout = 5.0,
    json: options.AsJson = False,
    relay: options.RelayPath = None,
) -> None:
    """Print the round trip to each other site, as the last heartbeats measured it.

    The exit code is 1 if a site is not linked.

    \b
    Examples:
      iris federation ping
      iris federation ping us ap --json
    """

    async def work() -> int:
        report = await _report(relay, timeout)
        found = {known["site"]: known for known in _sites(report)}
        missing = {"linked": False, "errors": ["the relay does not know this site"]}
        sites = [found.get(name, {"site": name, **missing}) for name in site or found]
        width = max((len(printable(known["site"])) for known in sites), default=0)
        for known in sites:
            rtt_ms = known["rtt_us"] / 1000 if known["linked"] else None
            if json:
                output.write_json(
                    {"site": known["site"], "linked": known["linked"], "rtt_ms": rtt_ms}
                )
            elif rtt_ms is not None:
                _print_line(f"{known['site']:<{width}}  {rtt_ms:.1f} ms")
            else:
                why = f": {'; '.join(known['errors'])}" if known["errors"] else ""
                _print_line(f"{known['site']:<{width}}  not linked{why}")
        if not sites:
            complain("the relay does not know any other site")
        return Exit.OK if all(known["linked"] for known in sites) else Exit.ANSWER

    run(work)


async def _report(relay: str | None, timeout: float) -> dict[str, Any]:
    async with connect(relay) as client:
        report = await client.status(timeout=timeout)
    if "limited" in report:
        raise iris.IrisError(
            f"the relay does not show other sites to this connection ({report['limited']}); ask on the host of a relay"
        )
    return report


def _sites(report: dict[str, Any]) -> list[dict[str, Any]]:
    """Return a document for every other site: those that the relay has a route to and, at a gateway, all that are
    configured."""
    suspended = set(report.get("sites_suspended", ()))
    found: dict[str, dict[str, Any]] = {}
    for known in report.get("sites", ()):
        found[known["site"]] = {**known, "linked": bool(known["ways"]), "errors": []}
    for peer in report.get("gateways", {}).get("peers", ()):
        name = peer["site"]
        site = found.setdefault(name, _unlinked(name, peer["cost_ms"]))
        site["errors"] += [
            f"{each['address']}: {each['error']}" for each in peer["addresses"] if each["error"]
        ]
        if not site["linked"] and not peer["addresses"]:
            site["errors"].append("it has not connected to this gateway")
    for name in suspended - found.keys():
        found[name] = _unlinked(name, 0)
    for site in found.values():
        site["suspended"] = site["site"] in suspended
    return sorted(found.values(), key=lambda site: str(site["site"]))


def _unlinked(name: str, cost_ms: int) -> dict[str, Any]:
    """Return the document of a site without a route."""
    counts = {"cost_ms": cost_ms, "rtt_us": 0, "ways": [], "clusters": 0, "topics": 0}
    return {"site": name, **counts, "linked": False, "errors": []}


def _print_table(report: dict[str, Any], sites: list[dict[str, Any]]) -> None:
    from rich.table import Table

    console = output.console()
    here = report.get("site") or "(none: this relay has no --site)"
    console.print(f"site {here}", markup=False)
    table = Table(box=None, pad_edge=False)
    table.add_column("SITE", no_wrap=True)
    for name in ("COST", "RTT", "WAYS", "CLUSTERS", "TOPICS"):
        table.add_column(name, justify="right")
    table.add_column("OVER", no_wrap=True)
    for site in sites:
        state = "suspended" if site["suspended"] else "not linked"
        over = (
            ", ".join(_route(report, route) for route in site["ways"]) if site["linked"] else state
        )
        rtt = f"{site['rtt_us'] / 1000:.1f} ms" if site["linked"] else "-"
        counts = (len(site["ways"]), site["clusters"], site["topics"])
        table.add_row(
            output.cell(site["site"]), f"{site['cost_ms']} ms", rtt, *map(str, counts), output.cell(over),
        )  # fmt: skip
    if sites:
        console.print(table)
    for site in sites:
        for error in site["errors"]:
            console.print(printable(f"not linked: {site['site']}: {error}"), markup=False)
    refused = report.get("gateways", {}).get("refused", {})
    if refused:
        reasons = ", ".join(f"{count} {why}" for why, count in refused.items())
        console.print(f"refused as gateways: {reasons}", markup=False)


def _route(report: dict[str, Any], route: dict[str, Any]) -> str:
    """Describe a route: the address of this relay's own connection, or the gateway of this site that has one."""
    if route["own"]:
        for connection in report.get("gateways", {}).get("connections", ()):
            if connection["peer"] == route["relay"]:
                return str(connection["address"])
    for link in report.get("links", ()):
        if link["peer"] == route["relay"]:
            return f"gateway {link['label']}"
    return f"relay {route['relay'][:8]}…"


def _print_line(text: str) -> None:
    output.write(printable(text).encode(errors="surrogateescape") + b"\n")
