"""`iris status`: what the relay of this host sees."""

from __future__ import annotations

from typing import Any

import iris
from iris.cli import options, output
from iris.cli.exits import Exit, run


def status(
    timeout: options.Timeout = 5.0,
    json: options.AsJson = False,
    relay: options.RelayPath = None,
) -> None:
    """Show the relay: its sessions, clusters and the account of its messages.

    \b
    Examples:
      iris status
      iris status --json | jq .accounts
    """

    async def work() -> int:
        async with iris.connect(relay) as client:
            report = await client.status(timeout=timeout)
        if json:
            output.write_json(report)
        else:
            _print_tables(report)
        return Exit.OK

    run(work)


def _print_tables(report: dict[str, Any]) -> None:
    from rich.table import Table

    console = output.console()
    console.print(
        f"[bold]relay[/] {report['relay']}  process {report.get('pid', '?')}, up {_duration(report.get('uptime_s', 0))}"
        + (", draining" if report["draining"] else "")
    )
    if "socket" in report:
        console.print(f"socket {report['socket']}", markup=False)
    sessions = Table(box=None, pad_edge=False, title="sessions", title_justify="left")
    sessions.add_column("PROGRAM", no_wrap=True)
    columns = ("pid", "members", "subscriptions", "running", "waiting", "tunnels", "held")
    for name in columns:
        sessions.add_column(name.upper(), justify="right")
    for session in report["sessions"]:
        sessions.add_row(session["label"], *(str(session[name]) for name in columns))
    clusters = Table(box=None, pad_edge=False, title="clusters", title_justify="left")
    for name in ("NAME", "KEY", "MEMBERS"):
        clusters.add_column(name, no_wrap=True)
    for name, by_key in report["clusters"].items():
        for key, count in by_key.items():
            clusters.add_row(name, key + "…", str(count))
    accounts = report["accounts"]
    dropped = ", ".join(f"{count} {cause}" for cause, count in accounts["dropped"].items())
    for table in (sessions, clusters):
        if table.row_count:
            console.print()
            console.print(table)
    console.print(
        f"\nmessages: {accounts['in']} in, {accounts['copied']} copied, {accounts['out']} out, {accounts['refused']} refused, "
        f"{accounts['expired']} expired, {accounts['held']} held; dropped: {dropped or 'none'}",
        markup=False,
    )


def _duration(seconds: float) -> str:
    minutes, whole = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {whole} s"
