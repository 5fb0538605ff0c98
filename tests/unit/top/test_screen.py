"""The screen of `iris top`: it fits every size, sorts, filters and scrolls, and keys do what the help says."""

from __future__ import annotations

from typing import Any

import pytest

from iris.cli.top.figures import (
    age,
    change,
    count,
    cut,
    milliseconds,
    padded,
    per_second,
    size,
    width,
)
from iris.cli.top.screen import KEYS, NAMES, Line, Screen, as_text
from iris.cli.top.tables import VIEWS
from iris.cli.top.terminal import keys
from iris.watch import (  # fmt: skip
    Cluster,
    Consumer,
    Drop,
    Link,
    Member,
    Network,
    Program,
    Relay,
    Site,
    Slow,
    Stream,
    Totals,
)


def member(serial: int, **changes: Any) -> Member:
    given = {
        "id": f"{'a' * 32}.{serial}", "host": f"host{serial % 3}", "relay": "a" * 32, "site": "", "program": "shop.py", "pid": 40 + serial,
        "version": "1.0", "iris": "0.1", "age_s": 60.0 * serial, "handled_rate": float(serial), "queued": serial, "p99_ms": 1.5 * serial,
    }  # fmt: skip
    return Member(**{**given, **changes})


def network(members: int = 5, **changes: Any) -> Network:
    rows = [member(serial) for serial in range(members)]
    given: dict[str, Any] = {
        "serial": 2, "time_us": 0, "interval_s": 2.0,
        "totals": Totals(in_rate=1200.0, out_rate=3.0, dropped_rate=0.5, refused_rate=0.0, unwanted_rate=29.0),
        "relays": [
            Relay(id="a" * 32, host="one", site="", asked=True, in_rate=1200.0, out_rate=3.0, dropped_rate=0.5, refused_rate=0.0),
            Relay(id="b" * 32, host="two", site="", state="away", error="its link was lost 4 s ago"),
        ],
        "links": [Link(relay="a" * 32, relay_host="one", peer="b" * 32, peer_host="two", rtt_ms=0.4, clock_offset_ms=-1.25, clock_error_ms=0.2)],
        "sites": [Site(name="eu", own=True), Site(name="us", rtt_ms=90.0, loss=0.01)],
        "clusters": [Cluster(name="orders", keyed=True, total=members, members=rows), Cluster(name="secret", keyed=False, total=3)],
        "programs": [Program(relay="a" * 32, host="one", label="web", session=1, pid=7, user="uid 1", held=3)],
        "streams": [Stream(name="log", uuid="u", host="one", store="s", source="topic log.>", messages=10, size_bytes=10_000, lag=4,
                           dead_letters=2, consumers=[Consumer(name="billing", shared=True, workers=1, lag=4, pending=1, redelivering=0, dead=0, missed=0, late=0)])],
        "drops": [Drop(where="relay one", host="one", cause="slow receiver", rate=0.5, total=9)],
        "slow": [Slow(kind="member", who=f"{'a' * 32}.2", name="slow.py 42", host="host2", where="orders", why=["p99 840 ms, 12 times the median of its cluster (70 ms)"], since_s=4.0)],
        "problems": ["relay /run/x: it does not answer"],
    }  # fmt: skip
    return Network(**{**given, **changes})


def text(lines: list[Line]) -> str:
    return "\n".join("".join(part for part, _ in line) for line in lines)


def shown(screen: Screen, seen: Network, columns: int = 160, lines: int = 40) -> str:
    return text(screen.draw(seen, columns, lines))


@pytest.mark.parametrize("columns", [1, 20, 80, 81, 132, 300])
@pytest.mark.parametrize("lines", [1, 2, 5, 24, 70])
def test_every_view_fits_every_size(columns: int, lines: int) -> None:
    screen = Screen()
    for number in range(len(NAMES)):
        screen.press(str(number + 1))
        for seen in (network(100), Network(serial=1, time_us=0, interval_s=0.0), None):
            for keys_ in ("", "?", "/"):
                for key in keys_:
                    screen.press(key)
                drawn = screen.draw(seen, columns, lines)
                assert len(drawn) <= lines
                assert max((sum(width(part) for part, _ in line) for line in drawn), default=0) <= columns  # fmt: skip
                for _ in keys_:
                    screen.press("escape")


def test_a_standard_terminal_shows_what_matters_most() -> None:
    seen = shown(Screen(), network(), 80, 24)
    for word in ("1 relay, 1 away", "8 members", "in 1,200/s", "CLUSTER", "HOST", "PROGRAM", "HANDLED/S", "P99", "QUEUE"):  # fmt: skip
        assert word in seen, word
    assert "relay /run/x: it does not answer" in seen
    assert "member slow.py 42 on host2 (orders): p99 840 ms" in seen
    assert seen.endswith(KEYS)
    assert "VERSION" not in seen
    assert "VERSION" in shown(Screen(), network(), 200)


def test_what_nobody_wants_is_shown_as_no_fault_and_drops_as_one() -> None:
    styles = {part.strip(): style for part, style in Screen().draw(network(), 200, 40)[0]}
    assert styles["unwanted 29/s"] == "dim"
    assert styles["dropped 0.5/s"] == "bad"
    none = network(totals=Totals(dropped_rate=0.0, unwanted_rate=0.0))
    assert "unwanted" not in shown(Screen(), none)
    relays = VIEWS["relays"](
        network(relays=[Relay(id="a", host="one", site="", unwanted_rate=9.0)])
    )
    at = [column.title for column in relays.columns].index("UNWANTED/S")
    assert (relays.rows[0][at].text, relays.rows[0][at].style) == ("9.0", "dim")


def styles_of(view: str, seen: Network) -> list[str]:
    """Return the styles of the first cells of a view's rows on the screen."""
    lines = Screen(view=view).draw(seen, 160, 40)[3:]
    return [lines[number][0][1] for number in range(len(VIEWS[view](seen).rows))]


def test_each_row_begins_in_the_colour_of_its_state() -> None:
    fine = member(1, state="up", queued=0)
    rows = [fine, member(2, state="up"), member(3, state="silent")]
    clusters = [Cluster(name="orders", keyed=True, total=3, members=rows), Cluster(name="other", keyed=False, total=1, other_members=1)]  # fmt: skip
    assert styles_of("members", network(clusters=clusters, slow=[])) == ["good", "warn", "bad", "dim"]  # fmt: skip
    assert styles_of("relays", network()) == ["bad", "bad"]
    assert styles_of("links", network()) == ["good"]
    programs = [
        Program(relay="", host="one", label=name, session=1, pid=1, user="", lost_messages=5)
        for name in ("lately", "long ago")
    ]
    lately = Slow(kind="program", who="lately (pid 1)", name="", host="one", where="", why=["lost"], since_s=1.0)  # fmt: skip
    seen = network(programs=programs, slow=[lately])
    assert sorted(styles_of("programs", seen)) == ["good", "warn"]


def test_the_number_of_relays_is_in_the_colour_of_the_network() -> None:
    def style(**changes: Any) -> str:
        return dict(Screen().draw(network(**changes), 160, 40)[0])["1 relay"]

    one = [Relay(id="a", host="one", site="", asked=True)]
    assert style(relays=one, slow=[], problems=[]) == "good"
    assert style(relays=one, problems=[]) == ""
    assert style(slow=[], problems=[]) == "", "one is away"


def test_a_wide_terminal_shows_other_views_beside_or_below_the_one_that_is_chosen() -> None:
    narrow, wide = (shown(Screen(view="relays"), network(), columns) for columns in (100, 220))
    assert "billing" not in narrow
    row = next(line for line in wide.splitlines() if line.startswith("one "))
    assert " │ " in row
    for text_ in ("clusters", "orders", "streams", "billing", "programs", "web", "slow receiver"):
        assert text_ in wide, text_
    assert wide.count("HOST") == 3, "the chosen view is shown once, before programs and drops"
    screen = Screen(view="relays")
    for key in "/one":
        screen.press(key)
    assert "billing" in shown(screen, network(), 220), "a filter is for the view that is chosen"
    below = shown(Screen(view="relays"), network(), 150).splitlines()
    assert not any(" │ " in line for line in below)
    assert below.index("clusters") > next(
        n for n, line in enumerate(below) if line.startswith("two")
    )
    many = network(programs=[Program(relay="", host="h", label="p", session=n, pid=n, user="") for n in range(50)])  # fmt: skip
    assert "44 more" in shown(Screen(view="relays"), many, 220)


def test_text_is_sorted_from_a_to_z_and_figures_from_the_largest_on() -> None:
    screen = Screen()

    def order(title: str) -> list[int]:
        while screen._order()[0] != title:
            screen.press("s")
        rows = [line for line in shown(screen, network()).splitlines() if "shop.py" in line]
        return [int(row.split()[3]) - 40 for row in rows]

    shown(screen, network())
    assert order("QUEUE") == [4, 3, 2, 1, 0]
    screen.press("r")
    assert order("QUEUE") == [0, 1, 2, 3, 4]
    assert order("HOST") == [0, 3, 1, 4, 2]
    assert "HOST▲" in shown(screen, network())
    screen.press("S")
    assert screen._order()[0] == "CLUSTER"


def test_a_filter_keeps_the_rows_that_have_its_text_until_it_is_removed() -> None:
    screen = Screen()
    for key in "/HOST1":
        screen.press(key)
    assert "/HOST1" in shown(screen, network())
    screen.press("enter")
    seen = shown(screen, network())
    assert seen.count("shop.py") == 2
    assert "filter: HOST1 (2 of 5 rows)" in seen
    screen.press("q")
    assert screen.quit, "after Enter keys are commands again"
    screen.press("escape")
    assert shown(screen, network()).count("shop.py") == 5
    for key in ("/", "x", "backspace", "backspace", *"zzz"):
        screen.press(key)
    assert "no row has this text" in shown(screen, network())


def test_a_long_table_scrolls_and_says_how_much_is_below() -> None:
    screen = Screen()
    seen = shown(screen, network(100), 160, 24)
    assert "rows below" in seen
    screen.press("down")
    screen.press("pagedown")
    assert screen.top > 10
    screen.press("end")
    assert "rows below" not in shown(screen, network(100), 160, 24)
    assert " 139 " in shown(screen, network(100), 160, 24)
    shown(screen, network(3), 160, 24)
    assert screen.top == 0, "the table has become shorter"
    screen.press("pageup")
    screen.press("home")
    assert screen.top == 0


def test_views_are_chosen_by_number_and_by_arrow() -> None:
    screen = Screen()
    screen.press("7")
    assert "billing" in shown(screen, network())
    screen.press("right")
    assert "slow receiver" in shown(screen, network())
    screen.press("left")
    screen.press("left")
    assert screen.view == "programs"
    screen.press("tab")
    assert screen.view == "streams"


def test_the_help_is_left_by_any_key() -> None:
    screen = Screen()
    screen.press("?")
    assert "choose a view" in shown(screen, network())
    screen.press("x")
    assert "choose a view" not in shown(screen, network())


def test_every_view_says_what_is_left_out_and_why_it_is_empty() -> None:
    other = dict.fromkeys(VIEWS, 7)
    for name, view in VIEWS.items():
        assert view(Network(serial=1, time_us=0, interval_s=0.0)).empty
        if name not in ("members",):
            assert "7 more" in view(network(other=other)).more, name
        for row in view(network()).rows:
            assert len(row) == len(view(network()).columns), name


def test_members_beyond_the_limit_are_a_row() -> None:
    clusters = [Cluster(name="orders", keyed=True, total=9, other_members=9)]
    assert "9 more" in shown(Screen(), network(clusters=clusters))


def test_the_text_of_one_look_has_each_table_with_rows() -> None:
    plain = as_text(network(), 200)
    for name in NAMES:
        assert f"\n{name}\n" in plain, name
    assert "problem: relay /run/x: it does not answer" in plain
    assert "\x1b" not in plain
    assert "shop.py" not in as_text(network(), 200, "billing")


@pytest.mark.parametrize(
    ("sent", "pressed"),
    [
        (b"q", ["q"]), (b"\x1b[A\x1b[6~x", ["up", "pagedown", "x"]), (b"\x1b", ["escape"]), (b"\x1bOC", ["right"]),
        (b"\r\x7f\t", ["enter", "backspace", "tab"]), (b"\x1b[1;5Cq", ["q"]), (b"\x1b[", []), ("ü".encode(), ["ü"]),
        (b"\xff\xfe", []), (b"\x1b[200~\x1b[201~", []), (b"\x1b\x1b", ["escape", "escape"]),
    ],
)  # fmt: skip
def test_what_a_terminal_sends_is_read_as_keys(sent: bytes, pressed: list[str]) -> None:
    assert keys(sent) == pressed


@pytest.mark.parametrize(
    ("shown_", "value"),
    [
        (count(1234), "1,234"), (count(1_234_567), "1.2M"), (count(5e18), "5000.0P"), (per_second(0.34), "0.3"), (per_second(0), "0"),
        (change(-12), "-12"), (change(0.01), "0"), (size(999), "999 B"), (size(1500), "1.5 kB"), (size(2e9), "2.0 GB"),
        (milliseconds(0.034), "0.03 ms"), (milliseconds(1.24), "1.2 ms"), (milliseconds(840), "840 ms"), (milliseconds(2100), "2.1 s"),
        (age(42), "42s"), (age(190), "3m10s"), (age(18_120), "5h02m"), (age(1_047_600), "12d03h"),
    ],
)  # fmt: skip
def test_figures_are_short(shown_: str, value: str) -> None:
    assert shown_ == value


def test_wide_characters_take_two_columns() -> None:
    assert width("日本") == 4
    assert width("é") == 1
    assert cut("日本語", 4) == "日…"
    assert padded("日本", 6, left=True) == "日本  "
    assert cut("abc", 0) == ""
