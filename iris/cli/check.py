"""`iris check`: is everything right with the relay of this host? Exit codes for monitoring."""

from __future__ import annotations

import asyncio
import contextlib
import os
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, Final, Literal, NamedTuple

import typer

import iris
from iris import keyfiles
from iris.cli import clock, options, output
from iris.cli.exits import run
from iris.core.troubles import ADVICE, described
from iris.errors import ConfigError, ConnectionLost, IrisError, KeyringError, RelayUnavailable
from iris.streams import StoreHealth
from iris.wire.names import plural, printable

State = Literal["ok", "warning", "critical"]
EXITS: Final[dict[State, int]] = {"ok": 0, "warning": 1, "critical": 2}
LOW_BYTES: Final = 256 << 20
"""A store with less free space on its disk is about to stop."""
LOW_SHARE: Final = 0.05
MAX_ERROR_S: Final = 1.0
"""A clock that is further off may be wrong in ways that people notice."""
FAR_S: Final = 60.0
"""Clocks that differ by more are a tenth of the way to `freshness_s`, after which messages are refused."""
TAKEN_S: Final = 3600.0
"""For how long a store that runs is reported whose streams another store has taken over."""
SHORTEST_S: Final = 0.5
"""Stores have at least this long to answer, whatever is left of the timeout."""
OURSELVES: Final = "ourselves"
"""Error of a seed that is the relay itself, as if all hosts have the same settings."""
SHOWN: Final = 5
"""How many names a line shows."""
SKIPPABLE: Final = ("links", "sites", "store", "stores", "programs", "keys", "clock")
LATELY_S: Final = 300.0
"""What programs reported before that is not of interest any more: checks run every few minutes."""


class Result(NamedTuple):
    """What one check found."""

    check: str
    state: State
    detail: str


def check(
    timeout: options.Timeout = 5.0,
    json: options.AsJson = False,
    skip: Annotated[
        list[str] | None,
        typer.Option(
            metavar="CHECK", help=f"Leave out a check: {', '.join(SKIPPABLE)}. Repeatable."
        ),
    ] = None,
    relay: options.RelayPath = None,
) -> None:
    """Check the relay of this host, for monitoring.

    Run it as the relay's user.

    \b
    Checks:
      relay   it answers, and is not stopping
      links   every known relay is linked
      sites   every site in peer_site is connected
      store   it runs and can serve, and its disk has space
      stores  every store of the site answers; those that have a bucket can
              write to it, and no other store has taken over their streams in
              the last hour; none keeps messages of a lost stream that the one
              in its place does not have
      programs
              none has reported in the last 5 minutes that it lost messages,
              or that its handlers raised exceptions
      keys    no program or link uses only a key that is to be retired
      clock   a time service keeps the clock, if there are other hosts

    \b
    Exit codes, those of Nagios and Icinga:
      0    all is well
      1    a warning: something is degraded
      2    critical: messages or streams do not get through

    The first line sums up the result, for tools that show one line.

    \b
    Examples:
      iris check
      iris check --json --skip clock
    """

    async def work() -> int:
        for name in skip or ():
            if name not in SKIPPABLE:
                known = ", ".join(SKIPPABLE)
                raise ConfigError(
                    f"--skip: {name!r} is not a check that can be left out; use {known}"
                )
        results = [r for r in await _results(relay, timeout) if r.check not in (skip or ())]
        worst: State = max((r.state for r in results), key=EXITS.__getitem__, default="ok")
        if json:
            output.write_json({"status": worst, "checks": [r._asdict() for r in results]})
        else:
            _print(worst, results)
        return EXITS[worst]

    run(work)


def _print(worst: State, results: list[Result]) -> None:
    wrong = [f"{r.check}: {r.detail}" for r in results if r.state == worst != "ok"]
    lines = [f"iris {worst}" + (f": {'; '.join(wrong)}" if wrong else "")]
    lines += [f"{r.state:<9}{r.check:<9}{r.detail}" for r in results]
    output.write("".join(printable(line) + "\n" for line in lines).encode())


async def _results(relay: str | None, timeout: float) -> list[Result]:
    began_s = time.monotonic()
    try:
        async with contextlib.AsyncExitStack() as opened:
            async with asyncio.timeout(timeout):
                asking = await opened.enter_async_context(
                    iris.connect(relay, keyring=iris.Keyring({}))
                )
                report = await asking.status(timeout=timeout)
            answered_s = time.monotonic() - began_s
            # A store that does not answer says nothing about the relay.
            stores = await asking.streams.stores(timeout=max(SHORTEST_S, timeout - answered_s))
    except (RelayUnavailable, ConnectionLost, TimeoutError) as err:
        why = str(err) if isinstance(err, IrisError) else f"no answer within {timeout:g} s"
        return [Result("relay", "critical", why)]
    found = list(judge(report, answered_s))
    if stores:
        found.append(Result("stores", *judge_stores(stores)))
    if "limited" not in report:
        found.append(Result("programs", *judge_programs(report)))
        found.append(Result("keys", *_keys(report)))
        found.append(Result("clock", *_clock(report)))
    return found


def judge(
    report: dict[str, Any], answered_s: float, free: Callable[[str], tuple[int, int] | None] | None = None
) -> Iterator[Result]:  # fmt: skip
    """Yield what a status says of the relay, its links, its sites and its store.

    `free` returns (free bytes, all bytes) of the disk of a directory; None if this user cannot see it.
    """
    if report["draining"]:
        yield Result("relay", "critical", "it is stopping")
    else:
        up_h = report.get("uptime_s", 0) / 3600
        yield Result("relay", "ok", f"answered in {answered_s * 1000:.0f} ms, up {up_h:.1f} h")
    if "limited" in report:
        yield Result("links", "warning", f"not checked: {report['limited']}")
        return
    yield Result("links", *_links(report))
    if "gateways" in report:
        yield Result("sites", *_sites(report))
    if "store" in report:
        yield Result("store", *_store(report["store"], free or _free))


def _links(report: dict[str, Any]) -> tuple[State, str]:
    unlinked = [
        f"{target['source']} ({target['error']})"
        for target in report.get("dialling", {}).get("unlinked", ())
        if target["error"] not in ("", OURSELVES)
    ]
    unlinked += [f"{peer[:8]}… (lost a moment ago)" for peer in report["suspended"]]
    up = plural(len(report["links"]), "link")
    if not unlinked:
        return "ok", f"{up} up, none missing"
    return ("warning" if report["links"] else "critical"), f"{up} up; not linked: {_some(unlinked)}"


def _sites(report: dict[str, Any]) -> tuple[State, str]:
    reached = {site["site"] for site in report["sites"] if site["ways"]}
    peers = [peer["site"] for peer in report["gateways"]["peers"]]
    missing = [site for site in peers if site not in reached]
    if not missing:
        return "ok", f"{plural(len(reached), 'site')} connected"
    state: State = "warning" if reached else "critical"
    return state, f"not connected: {_some(missing)}; `iris federation list` shows why"


def _store(
    store: dict[str, Any], free: Callable[[str], tuple[int, int] | None]
) -> tuple[State, str]:
    if store["cannot_serve"]:
        return "critical", f"cannot serve: {store['cannot_serve']}"
    if store["pid"] is None:
        return "critical", f"not running; it was started {plural(store['starts'], 'time')}"
    space = free(store["data"])
    if space is None:
        return "ok", "running; its disk cannot be seen by this user"
    left, whole = space
    text = f"{left / 1e9:.1f} GB ({left / max(1, whole):.0%}) free on the disk of {store['data']}"
    if left < LOW_BYTES:
        return "critical", text
    return ("warning" if left < LOW_SHARE * whole else "ok"), f"running; {text}"


def judge_stores(stores: Sequence[StoreHealth]) -> tuple[State, str]:
    """Judge all stores of the site by what they say of themselves."""
    wrong = [(each, found) for each in stores for found in _wrong(each)]
    if not wrong:
        buckets = sum(each.has_bucket for each in stores)
        text = f"{plural(len(stores), 'store')} of the site {'answers' if len(stores) == 1 else 'answer'}"
        return "ok", text + (f", {buckets} with a bucket" if buckets else "")
    worst = max((state for _, (state, _) in wrong), key=EXITS.__getitem__)
    # The worst first, because a line does not show all.
    wrong.sort(key=lambda each: -EXITS[each[1][0]])
    return worst, _some([f"{_called(store)} {text}" for store, (_, text) in wrong])


def _called(store: StoreHealth) -> str:
    return f"store {store.store[:8]} on {store.host}" if store.host else f"store {store.store[:8]}"


def _wrong(store: StoreHealth) -> Iterator[tuple[State, str]]:
    """Yield what is wrong with a store."""
    if store.error:
        yield "critical", f"did not answer: {store.error}"
        return
    if store.away:
        waiting = f"; {store.waiting_bytes:,} bytes wait for it" if store.waiting_bytes else ""
        yield "critical", f"cannot write to its bucket: {store.away}{waiting}"
    if store.not_taken:
        yield "critical", f"cannot take over from stores that are gone: {store.not_taken}"
    if store.only_there:
        yield (
            "warning",
            f"keeps {plural(store.superseded, 'stream')} whose place others have taken, with up to {plural(store.only_there, 'message')} "
            "that these do not have; `iris stream list` names them, read them by --uuid, and delete them when you are done",
        )
    if store.taken and store.taken_s < TAKEN_S:
        minutes = f"{store.taken_s / 60:.0f} min" if store.taken_s >= 60 else "less than a minute"
        yield (
            "warning",
            f"lost its streams in the bucket to another store {minutes} ago; its log says when it noticed",
        )


def judge_programs(report: dict[str, Any]) -> tuple[State, str]:
    """Judge what programs report of themselves: messages that they lost, and handlers that raised."""
    late = [
        each
        for each in report["troubles"]["latest"]
        if each["cause"] in ADVICE and each["last_s"] <= LATELY_S
    ]
    if not late:
        return (
            "ok",
            f"none has reported losses or failed handlers in the last {LATELY_S / 60:.0f} min",
        )
    late.sort(key=lambda each: -each["count"])
    return "warning", _some(
        [
            f"{each['label']} (pid {each['pid']}) {described(each['cause'], each['count'], each['names'])}; "
            f"{ADVICE[each['cause']]}"
            for each in late
        ]
    )


def _free(directory: str) -> tuple[int, int] | None:
    try:
        found = os.statvfs(directory)
    except OSError:
        return None
    return found.f_bavail * found.f_frsize, found.f_blocks * found.f_frsize


def _keys(report: dict[str, Any]) -> tuple[State, str]:
    """Find programs and links that use only a key that a rotation is about to retire."""
    behind: list[str] = []
    names: list[str] = []
    try:
        entries = keyfiles.load_keys(os.environ).entries()
    except KeyringError:
        entries = {}
    for name, (sealing, *others) in entries.items():
        names += [name] * bool(others)
        behind += outdated(report, name, _digits(sealing), {_digits(key) for key in others})
    network = keyfiles.config_directory(os.environ) / keyfiles.NETWORK_FILE
    behind += _outdated_links(report, network)
    if behind:
        return "warning", f"only an old key is in use by {_some(behind)}"
    if names:
        return (
            "ok",
            f"a rotation is under way ({_some(names)}); no program here uses only an old key",
        )
    return "ok", "no rotation is under way" if entries else "no keyring here; network keys checked"


def outdated(report: dict[str, Any], name: str, sealing: str, others: set[str]) -> Iterator[str]:
    """Yield the programs that have proved one of the `others`, and not the key that seals."""
    for session in report["sessions"]:
        keys = set(session["keys"])
        old = keys & others
        if old and sealing not in keys and not any(key.startswith("+") for key in keys):
            yield f"{session['label']} (pid {session['pid']}, {name} under {min(old)}…)"


def _outdated_links(report: dict[str, Any], path: Path) -> Iterator[str]:
    try:
        first, *others = (key.fingerprint.hex()[:8] for key in keyfiles.load_network_keys(path))
    except (IrisError, ValueError):
        return
    for link in report["links"]:
        if link.get("network") in others and link["network"] != first:
            yield f"the link to {link['label']} (network {link['network']}…)"


def _digits(key: iris.ClusterKey) -> str:
    return key.key_id.hex()[:8]


def _clock(report: dict[str, Any]) -> tuple[State, str]:
    """Judge our clock by the clocks of other relays, and by what the kernel knows from a time service."""
    state, text = _kept(alone=not report["links"] and not report["sites"])
    differing = sorted(_differing(report), reverse=True)
    if not differing:
        return state, text
    worst_s = differing[0][0]
    names = _some([each for _, each in differing])
    return (
        "critical" if worst_s > FAR_S else "warning"
    ), f"it differs from that of {names}; {text}"


def _differing(report: dict[str, Any]) -> Iterator[tuple[float, str]]:
    """Yield the relays whose clock surely differs by more than `MAX_ERROR_S`: (by how many seconds at least, text)."""
    ways = [(site["site"], way) for site in report["sites"] for way in site["ways"]]
    for name, peer in [*((link["label"], link) for link in report["links"]), *ways]:
        if peer.get("clock_offset_us") is None:
            continue
        offset_s, error_s = peer["clock_offset_us"] / 1e6, peer["clock_error_us"] / 1e6
        if abs(offset_s) - error_s > MAX_ERROR_S:
            ahead = "ahead" if offset_s > 0 else "behind"
            text = f"{printable(name)}, which is {ahead} by {abs(offset_s):,.1f} s"
            yield abs(offset_s) - error_s, text


def _kept(*, alone: bool) -> tuple[State, str]:
    """Judge our clock by what the kernel knows of it."""
    found = clock.read()
    if found is None:
        return "ok", "the system does not say whether a time service keeps it"
    if not found.synchronized:
        text = (
            "no time service keeps it; messages over 10 min old by the receiver's clock are refused"
        )
        return ("ok" if alone else "warning"), text
    text = f"kept by a time service to within {found.max_error_s * 1000:.0f} ms (now off by {found.offset_s * 1000:.1f} ms)"
    return ("warning" if found.max_error_s > MAX_ERROR_S and not alone else "ok"), text


def _some(texts: list[str]) -> str:
    more = len(texts) - SHOWN
    return "; ".join(texts[:SHOWN]) + (f" and {more} more" if more > 0 else "")
