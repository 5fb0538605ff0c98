"""Every bench, beside its twin or beside another run of Iris, in two tables: `make bench-floor`.

    python bench/run.py                 # ten to fifteen minutes
    python bench/run.py --rounds 1      # three minutes; the spread is unknown

Prints Markdown to stdout and progress to stderr; all output of the benches goes to bench/results/floor.json. If a bench
fails, the others still run, and the exit code is 1.
"""

from __future__ import annotations

import argparse
import json
import signal
import subprocess
import sys
from dataclasses import dataclass
from typing import Any, Final

import harness
from harness import BENCH, Result

RESULTS: Final = BENCH / "results" / "floor.json"
PUBLISH: Final = "publish 1 KiB, "
REQUEST: Final = "request 256 B, "
LINKED: Final = ["--relays", "2"]
TWIN_THEN: Final = 1.29e6
"""Messages/s of the publishing twin on the machine for which the wanted figures were set (1.15 to 1.43 million)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One line of a table."""

    what: str
    command: list[str]
    key: str
    unit: str
    ratio: str = "ratio"
    other: str = "twin"
    """Prefix of the figures to compare with."""
    wish: str = ""
    at_least: float = 0.0
    """Wanted figure on a machine where the publishing twin reaches `TWIN_THEN`."""


ROWS: Final = (
    Row(what=PUBLISH + "callback", command=["throughput.py"], key="rate", unit="msg/s"),
    Row(
        what=PUBLISH + "async for",
        command=["throughput.py", "--mode", "async-for"],
        key="rate",
        unit="msg/s",
    ),
    Row(
        what=PUBLISH + "8 subscribers",
        command=["throughput.py", "--subscribers", "8"],
        key="rate",
        unit="msg/s",
    ),
    Row(
        what=PUBLISH + "1,000 topics",
        command=["throughput.py", "--topics", "1000"],
        key="rate",
        unit="msg/s",
    ),
    Row(
        what="tunnel, 64 KiB messages",
        command=["throughput.py", "--tunnel"],
        key="rate",
        unit="MB/s",
    ),
    Row(what=REQUEST + "1 in flight, p50", command=["roundtrip.py"], key="p50_us", unit="µs"),
    Row(
        what=REQUEST + "1 in flight, p99",
        command=["roundtrip.py"],
        key="p99_us",
        ratio="p99_ratio",
        unit="µs",
    ),
    Row(
        what=REQUEST + "64 in flight",
        command=["roundtrip.py", "--inflight", "64"],
        key="rate",
        unit="req/s",
    ),
)


def linked(what: str, command: list[str], key: str, unit: str, **more: Any) -> Row:
    """Return a row that compares two linked relays with one."""
    given: dict[str, Any] = {"ratio": "ratio_one_relay", "other": "one_relay", **more}
    return Row(what=f"{what}: two relays / one", command=command, key=key, unit=unit, **given)


SELF_ROWS: Final = (
    linked(PUBLISH + "callback", ["throughput.py", *LINKED], "rate", "msg/s", wish="≥ 0.5"),
    linked(
        PUBLISH + "8 subscribers",
        ["throughput.py", "--subscribers", "8", *LINKED],
        "rate",
        "msg/s",
    ),
    linked(
        "tunnel, 64 KiB messages",
        ["throughput.py", "--tunnel", *LINKED],
        "rate",
        "MB/s",
        at_least=500.0,
    ),
    linked(REQUEST + "1 in flight, p50", ["roundtrip.py", *LINKED], "p50_us", "µs", wish="≤ 2"),
    linked(
        REQUEST + "1 in flight, p99",
        ["roundtrip.py", *LINKED],
        "p99_us",
        "µs",
        ratio="p99_ratio_one_relay",
    ),
    linked(
        REQUEST + "64 in flight",
        ["roundtrip.py", "--inflight", "64", *LINKED],
        "rate",
        "req/s",
        at_least=40_000.0,
    ),
    *(
        Row(
            what=f"32 callers at {relay}: a slow member beside the fast one / the fast one alone",
            command=["balance.py", "slow"],
            key=f"{name}_rate",
            ratio=f"{name}_ratio",
            other="alone",
            unit="req/s",
            wish="≥ 0.9",
        )
        for name, relay in (
            ("fast", "the fast one's relay"),
            ("slow", "the slow one's relay"),
            ("both", "both relays"),
        )
    ),
    Row(
        what="request p99 over a link: with 1 MiB at 100/s on it / without",
        command=["mixed.py"],
        key="p99_us",
        other="alone",
        unit="µs",
        wish="≤ 3",
    ),
    Row(
        what="request p99 over a link: with 1 MiB at 100/s on it / on another",
        command=["mixed.py"],
        key="p99_us",
        ratio="ratio_elsewhere",
        other="elsewhere",
        unit="µs",
    ),
    Row(
        what="request p99: with 10,000 strangers at the link port / without",
        command=["strangers.py", "--seconds=20"],
        key="p99_us",
        other="alone",
        unit="µs",
        wish="≤ 2",
    ),
)
SHARES: Final = ["balance.py", "shares"]


class Failed(Exception):
    """A bench failed; the message has its command line and exit code."""


def measure(command: list[str], rounds: int, seconds: float) -> Result:
    """Run one bench and return its output. When interrupted, also stop the processes that the bench started."""
    line = [sys.executable, str(BENCH / command[0]), *command[1:]]
    line += [f"--rounds={rounds}"]
    if not any(word.startswith("--seconds") for word in command):
        line += [f"--seconds={seconds}"]
    print(f"{' '.join(command)}:", file=sys.stderr, flush=True)
    process = subprocess.Popen(line, stdout=subprocess.PIPE)
    try:
        output, _ = process.communicate()
    except BaseException:
        process.send_signal(signal.SIGINT)
        process.communicate()
        raise
    if process.returncode:
        raise Failed(f"{' '.join(command)}: exit {process.returncode}, see above")
    result: Result = json.loads(output)
    return result


def show(row: Row, result: Result | None, twin_rate: float | None = None) -> str:
    """Return one line of a table. Wanted figures that depend on the machine are scaled by `twin_rate` of the
    publishing twin."""
    wish = row.wish
    if row.at_least:
        scaled = row.at_least * twin_rate / TWIN_THEN if twin_rate else row.at_least
        wish = f"≥ {scaled:,.0f} {row.unit} here"
    last = f" {wish} |" if row.other != "twin" else ""
    if result is None:
        return f"| {row.what} | failed | | | |{last}"
    low, high = result[f"{row.ratio}_min_max"]
    ours, other = result[row.key], result[f"{row.other}_{row.key}"]
    return (
        f"| {row.what} | {ours:,.0f} {row.unit} | {other:,.0f} {row.unit} | {result[row.ratio]:.2f} "
        f"| {low:.2f}-{high:.2f} |{last}"
    )


def show_shares(result: Result | None) -> str:
    """Return a sentence about the shares of equal members."""
    if result is None:
        return "Shares of four equal members, three at one relay and one at the other: failed."
    largest = [f"{name}: largest {result[name]['largest']:.1%}" for name in result["spreads"]]
    return (
        "Shares of four equal members, three at one relay and one at the other "
        f"(wish for 16 at each: ≤ 30 %): {'; '.join(largest)}."
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=1.0, help="of sending, per run")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    facts = harness.facts()
    results: dict[str, Result | None] = {}
    failures: list[str] = []
    for command in (*(row.command for row in (*ROWS, *SELF_ROWS)), SHARES):
        name = " ".join(command)
        if name in results:
            continue
        try:
            results[name] = measure(command, args.rounds, args.seconds)
        except Failed as err:
            results[name] = None
            failures.append(str(err))
    document: dict[str, Any] = {"facts": facts, "rounds": args.rounds, "results": results}
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(json.dumps(document, indent=1) + "\n")
    print("| what | Iris | twin | Iris / twin, median | min-max |\n|---|---|---|---|---|")
    for row in ROWS:
        print(show(row, results[" ".join(row.command)]))
    plain = results["throughput.py"]
    print("\n| what | Iris | beside | ratio, median | min-max | wish |\n|---|---|---|---|---|---|")
    for row in SELF_ROWS:
        twin_rate = plain and plain["twin_rate"]
        print(show(row, results[" ".join(row.command)], twin_rate))
    print("\n" + show_shares(results[" ".join(SHARES)]))
    changed = ", modified" if facts["uncommitted_changes"] else ""
    packages = ", ".join(f"{name} {version}" for name, version in facts["packages"].items())
    print(
        f"\n{facts['utc']}, commit {facts['commit']}{changed}; {facts['cpu']}, {facts['cpus']} cores, "
        f"Linux {facts['kernel']}, Python {facts['python']} ({facts['python_built']}), {packages}; "
        f"{args.rounds} rounds of {args.seconds:g} s. Ratios: of rates, more is better; of µs, less."
    )
    if failures:
        sys.exit("\n".join(failures))


if __name__ == "__main__":
    main()
