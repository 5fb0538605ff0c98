"""`iris status`: show the state of a relay."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, Final

from iris.cli import options, output
from iris.cli.exits import Exit, run
from iris.client import connect
from iris.core.troubles import described
from iris.wire.names import plural, printable
from iris.wire.texts import cleaned

if TYPE_CHECKING:
    from rich.table import Table

RATE_S: Final = 0.5
"""Time between the two reports from which the rates of links are computed."""


def status(
    timeout: options.Timeout = 5.0,
    json: options.AsJson = False,
    relay: options.RelayPath = None,
) -> None:
    """Show the relay: sessions, clusters, links to other relays, other sites, and counts of messages.

    Anything unusual is a line of its own: slow receivers, full queues, limits
    that were reached, refused connections. docs/operation.md explains them.

    \b
    Columns of programs, other relays and sites:
      MEMBERS        clusters that it serves; members of a cluster, or at another relay.
                     iris-store has two for itself, and more for its streams
      SUBSCRIPTIONS  topics and filters that it receives
      RUNNING        calls that it is working on
      WAITING        its own calls that wait for an answer
      TUNNELS        open tunnels
      HELD           messages queued for it, because it does not read fast enough
      KEYS           first digits of the ids of the keys that it has proved
      IN/S, OUT/S    frames a second from and to the other relay
      COST           configured cost (site_cost); sites are compared by it plus the round trip
      WAYS           gateway connections that lead there

    \b
    Examples:
      iris status
      iris status --json | jq .accounts
    """

    async def work() -> int:
        async with connect(relay) as client:
            report = await client.status(timeout=timeout)
            before = report
            if report.get("links") and not json:
                await asyncio.sleep(RATE_S)
                report = await client.status(timeout=timeout)
        if json:
            output.write_json(report)
        else:
            _print_tables(cleaned(report), cleaned(before))
        return Exit.OK

    run(work)


def _print_tables(report: dict[str, Any], before: dict[str, Any]) -> None:
    from rich.table import Table
    from rich.text import Text

    console = output.console()
    process = [f"process {report['pid']}"] if "pid" in report else []
    # A session with a ticket is not told.
    up = [f"up {_duration(report['uptime_s'])}"] if "uptime_s" in report else []
    state = ", ".join([*process, *up, *["draining"] * report["draining"]])
    console.print(Text.assemble(("relay", "bold"), f" {report['relay']}  {state}".rstrip()))
    if "socket" in report:
        console.print(f"socket {report['socket']}", markup=False)
    if "limited" in report:
        counts = ", ".join(
            plural(count, name.removesuffix("s")) for name, count in report["counts"].items()
        )
        console.print(f"{counts}; {report['limited']}", markup=False)
    if why := report.get("store", {}).get("cannot_serve"):
        console.print(
            f"store {report['store']['data']} cannot serve: {printable(why)}", markup=False
        )
    sessions = Table(box=None, pad_edge=False, title="sessions", title_justify="left")
    sessions.add_column("PROGRAM", no_wrap=True)
    columns = ("pid", "members", "subscriptions", "running", "waiting", "tunnels", "held")
    for name in columns:
        sessions.add_column(name.upper(), justify="right")
    sessions.add_column("KEYS")
    for session in report["sessions"]:
        keys = " ".join(session.get("keys", ()))
        sessions.add_row(
            *map(output.cell, (session["label"], *(session[name] for name in columns), keys))
        )
    clusters = Table(box=None, pad_edge=False, title="clusters", title_justify="left")
    for name in ("NAME", "KEY", "MEMBERS"):
        clusters.add_column(name, no_wrap=True)
    for name, by_key in report.get("clusters", {}).items():
        for key, count in by_key.items():
            clusters.add_row(*map(output.cell, (name, f"{key}…", count)))
    accounts = report["accounts"]
    dropped = ", ".join(f"{count} {cause}" for cause, count in accounts["dropped"].items())
    for table in (sessions, clusters, _links(report, before), _sites(report)):
        if table.row_count:
            console.print()
            console.print(table)
    for target in report.get("dialling", {}).get("unlinked", ()):
        if target["error"] not in ("", "ourselves"):
            address = target["source"].rpartition(" ")[2]
            why = target["error"].removeprefix(f"{address}: ")
            line = (
                f"not linked: {target['source']}: {why} ({plural(target['failures'], 'attempt')})"
            )
            console.print(printable(line), markup=False)
    for each in report.get("other_keys", ()):
        there = ", ".join(f"{count} under {key}" for key, count in each["others"].items())
        line = f"topic {each['topic']}: no subscribers under the key {each['key']} of its publisher; {there}; compare `iris key show`"
        console.print(printable(line), markup=False)
    found = report.get("discovery", {}).get("nothing_found")
    if found:
        tried = ", ".join(found["tried"]) or "nothing"
        console.print(
            f"\nno other relay found; tried {tried}. Where multicast does not reach: {found['try']}",
            markup=False,
        )
    gateways = report.get("gateways", {})
    reached = {site["site"] for site in report.get("sites", ()) if site["ways"]}
    unlinked = [peer["site"] for peer in gateways.get("peers", ()) if peer["site"] not in reached]
    if unlinked:
        line = f"\nsites not linked: {', '.join(unlinked)}; `iris federation list` shows why"
        console.print(line, markup=False)
    for line in (
        *_slow(report),
        *_troubles(report),
        *_waiting(report),
        *_over(report),
        *_queues(report),
    ):
        console.print(f"\n{printable(line)}", markup=False)
    tickets = report.get("web", {}).get("tickets") or {}
    for what, reasons in (
        ("as links", report.get("links_refused", {})),
        ("as sessions", report.get("sessions_refused", {})),
        ("from browsers", report.get("web", {}).get("refused", {})),
        ("to browsers by their tickets", tickets.get("denied", {})),
        ("as gateways", gateways.get("refused", {})),
        ("from other sites", report.get("sites_refused", {})),
    ):
        refused = ", ".join(f"{count} {printable(why)}" for why, count in reasons.items())
        if refused:
            console.print(f"\nrefused {what}: {refused}", markup=False)
    direct = report.get("direct", {})
    if direct.get("made"):
        console.print(f"\n{_direct(direct)}", markup=False)
    console.print(
        f"\nmessages: {accounts['in']} in, {accounts['copied']} copied, {accounts['out']} out, {accounts['unwanted']} unwanted, {accounts['refused']} refused, "
        f"{accounts['expired']} expired, {accounts['held']} held; dropped: {dropped or 'none'}",
        markup=False,
    )
    console.print("columns: `iris status --help`", style="dim")


def _waiting(report: dict[str, Any]) -> Iterator[str]:
    """Yield a line if publishers are waiting for subscribers, and one if some went on because too many wait."""
    count = report.get("publishers_waiting")
    if count:
        yield f"publishers waiting: {plural(count, 'topic')} with subscribers that are full, or for which messages are dropped"
    if over := report.get("publishers_unlimited"):
        yield f"published without waiting: {plural(over, 'topic')}, because their sessions have too many others that wait; subscribers whose queues are full lose messages"


def _queues(report: dict[str, Any]) -> Iterator[str]:
    """Yield a line with the total of all queues, if anything is queued or the limit was ever reached."""
    queues = report.get("queues")
    if queues and (queues["bytes"] or queues["full"] or queues["shed"]):
        yield (
            f"queued in all: {queues['bytes'] / 1e6:.1f} of {queues['limit_bytes'] / 1e6:.1f} MB; "
            f"{queues['full']} frames arrived at the limit, {queues['shed']} queued messages were dropped to make room"
        )


def _direct(direct: dict[str, Any]) -> str:
    """Return a line with what the ends of direct tunnels report; the relay's message counts do not include it."""
    return (
        f"direct tunnels: {direct['open']} open (limit {direct['limit']}), {direct['made']} in all; their ends report "
        f"{direct['sent_records']} records sent ({direct['sent_bytes'] / 1e6:,.1f} MB) and {direct['received_records']} "
        f"received ({direct['received_bytes'] / 1e6:,.1f} MB), which the messages below do not include"
    )


def _slow(report: dict[str, Any]) -> Iterator[str]:
    """Yield a line for each receiver for which messages were dropped, also after it has caught up or left."""
    for slow in report.get("slow", ()):
        who = [f"pid {slow['pid']}"] if slow["pid"] else []
        who += [each for each in (slow["user"], slow["address"]) if each]
        since = datetime.now(UTC).astimezone() - timedelta(seconds=slow["since_s"])
        what = "slow: link to" if slow["link"] else "slow:"
        topics = ", ".join(slow["topics"])
        yield (
            f"{what} {slow['label']} ({', '.join(who)}): {plural(slow['dropped'], 'message')} dropped since {since:%Y-%m-%d %H:%M:%S}, "
            f"the last {_duration(slow['last_s'])} ago; topics: {topics}"
        )


def _troubles(report: dict[str, Any]) -> Iterator[str]:
    """Yield a line for what each program reports to have lost, or to have failed, also after it has ended."""
    for each in report.get("troubles", {}).get("latest", ()):
        who = [f"pid {each['pid']}"] if each["pid"] else []
        who += [text for text in (each["user"], each["address"]) if text]
        what = described(each["cause"], each["count"], each["names"])
        yield f"reported: {each['label']} ({', '.join(who)}): {what}; the last {_duration(each['last_s'])} ago"


def _over(report: dict[str, Any]) -> Iterator[str]:
    """Yield a line for each limit, or user's share of one, that was reached; see §13 of docs/protocol.md."""
    tables = {**report.get("quotas", {}), "sessions": report.get("users", {})}
    for name, table in tables.items():
        if table.get("refused"):
            what = name.replace("_", " ")
            yield (
                f"{what}: {table['refused']} refused at the limit, or at a user's share of it "
                f"(now {table['held']} of {table['limit']})"
            )
    for link in report.get("links", ()):
        if link.get("untaken") or link.get("over_share"):
            yield f"link to {link['label']}: {_refused(link)}"
    if report.get("sites_untold"):
        yield f"{report['sites_untold']} addresses and topics of this site are over the limit and not advertised to other sites"
    for site in report.get("sites", ()):
        if site.get("untaken") or site.get("untold") or site.get("over_share"):
            yield (
                f"site {site['site']}: {_refused(site)}; "
                f"{site.get('untold', 0)} of its entries are not advertised to other relays"
            )


def _refused(side: dict[str, Any]) -> str:
    """Return what was refused of a link or site."""
    return (
        f"refused {side.get('untaken', 0)} entries over the limit, "
        f"and {side.get('over_share', 0)} calls over their sender's share"
    )


def _links(report: dict[str, Any], before: dict[str, Any]) -> Table:
    """Return the table of links, with rates between the two reports."""
    from rich.table import Table

    table = Table(box=None, pad_edge=False, title="links", title_justify="left")
    table.add_column("HOST", no_wrap=True)
    table.add_column("RELAY", no_wrap=True)
    table.add_column("ADDRESS", no_wrap=True)
    for name in (
        "RTT",
        "IN/S",
        "OUT/S",
        "MEMBERS",
        "TOPICS",
        "RUNNING",
        "WAITING",
        "TUNNELS",
        "HELD",
    ):
        table.add_column(name, justify="right")
    earlier = {link["peer"]: link for link in before.get("links", ())}
    passed_s = max(0.001, report.get("uptime_s", 0) - before.get("uptime_s", 0))
    for link in report.get("links", ()):
        known = earlier.get(link["peer"], link)
        rates = (
            f"{max(0, link.get(name, 0) - known.get(name, 0)) / passed_s:,.0f}"
            for name in ("in_frames", "out_frames")
        )
        counts = (
            str(link[name])
            for name in ("members", "topics", "running", "waiting", "tunnels", "held")
        )
        rtt = f"{link['rtt_us'] / 1000:.1f} ms"
        table.add_row(
            output.cell(link["label"]),
            link["peer"][:8] + "…",
            output.cell(link.get("address", "")),
            rtt,
            *rates,
            *counts,
        )
    for peer in report.get("suspended", ()):
        table.add_row("", peer[:8] + "…", "suspended")
    return table


def _sites(report: dict[str, Any]) -> Table:
    """Return the table of other sites; `iris federation list` shows the routes to each."""
    from rich.table import Table

    table = Table(box=None, pad_edge=False, title="other sites", title_justify="left")
    table.add_column("SITE", no_wrap=True)
    for name in ("RTT", "LOSS", "COST", "WAYS", "CLUSTERS", "TOPICS"):
        table.add_column(name, justify="right")
    connections = report.get("gateways", {}).get("connections", ())
    for site in report.get("sites", ()):
        counts = (str(site[name]) for name in ("clusters", "topics"))
        lost = [c["loss"] for c in connections if c["site"] == site["site"] and "loss" in c]
        loss = (
            f"{max(lost):.2%}" if lost else "-"
        )  # only a gateway knows the loss, of its own connections
        distance = (f"{site['rtt_us'] / 1000:.1f} ms", loss, f"{site['cost_ms']} ms")
        table.add_row(output.cell(site["site"]), *distance, str(len(site["ways"])), *counts)
    for site in report.get("sites_suspended", ()):
        table.add_row(output.cell(site), "suspended")
    return table


def _duration(seconds: float) -> str:
    minutes, whole = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {whole} s"
