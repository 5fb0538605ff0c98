"""The picture of `iris top` in docs/monitoring.md is what it draws."""

from __future__ import annotations

from pathlib import Path

from iris.cli.top.screen import Screen
from iris.watch import Cluster, Consumer, Member, Network, Relay, Slow, Stream, Totals

PAGE = (Path(__file__).parents[3] / "docs" / "monitoring.md").read_text("utf-8")


def member(host: str, pid: int, handled: float, p99_ms: float, **more: float | str) -> Member:
    given = {
        "id": f"{pid:032x}.1", "host": host, "relay": "", "site": "", "program": "iris run shop", "pid": pid, "handled_rate": handled,
        "failed_rate": 0.0, "p50_ms": p99_ms / 4, "p99_ms": p99_ms, "running": 4, "age_s": 93_000.0, "version": "2.1",
    }  # fmt: skip
    return Member(**{**given, **more})  # type: ignore[arg-type]  # the types of the fields are those of the figures


def picture() -> str:
    """Return a screen of 100 columns and 16 lines of a made-up network."""
    why = ["p99 840 ms, 11 times the median of its cluster (76 ms)", "queue of 310 messages, growing by 41 a second"]  # fmt: skip
    lag = ["lag of 12,400 messages, growing by 120 a second"]
    orders = [member("anna", 712, 420, 71), member("bert", 655, 411, 76), member("cora", 701, 96, 840, queued=310)]  # fmt: skip
    billing = [member("bert", 690, 12, 8.4, failed_rate=0.4)]
    network = Network(
        serial=9, time_us=0, interval_s=2.0,
        totals=Totals(in_rate=1260.0, out_rate=1312.0, dropped_rate=0.0, refused_rate=0.0),
        relays=[Relay(id="a", host="anna", site="", asked=True)],
        clusters=[
            Cluster(name="billing", keyed=True, total=1, members=billing),
            Cluster(name="orders", keyed=True, total=3, members=orders),
            Cluster(name="payroll", keyed=False, total=2, other_members=2),
        ],
        streams=[
            Stream(name="log", uuid="", host="anna", store="", source="", messages=0, size_bytes=0, lag=12_400, consumers=[
                Consumer(name="archive", shared=True, workers=2, lag=12_400, pending=0, redelivering=0, dead=0, missed=0, late=0)])
        ],
        slow=[
            Slow(kind="member", who=f"{701:032x}.1", name="iris run shop 701", host="cora", where="orders", why=why, since_s=8.0),
            Slow(kind="consumer", who="archive", name="archive", host="anna", where="log", why=lag, since_s=4.0),
        ],
    )  # fmt: skip
    lines = ["".join(text for text, _ in line).rstrip() for line in Screen().draw(network, 100, 14)]
    lines[0] = f"{lines[0][:9]}14:03:27{lines[0][17:]}"
    return "".join(f"    {line}".rstrip() + "\n" for line in lines)


def test_the_page_shows_what_is_drawn() -> None:
    assert picture() in PAGE, f"put this into docs/monitoring.md:\n{picture()}"
