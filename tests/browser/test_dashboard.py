"""The page of `iris dashboard` in a browser: what it shows is true, and it can be used by everybody."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
from browser.kit import Pages, linked_hosts, named, running
from support.dashboards import TOKEN, Dashboard
from support.relays import Daemon, client
from support.waiting import PATIENCE_S

import iris

pytestmark = pytest.mark.asyncio(loop_scope="session")

ACCOUNT = ("in", "copied", "out", "unwanted", "refused", "dropped", "expired", "held")


def numbers(row: dict[str, str]) -> dict[str, int]:
    """Return the account that a row of the page shows."""
    return {word: int(row[word.capitalize()].replace(",", "")) for word in ACCOUNT}


async def accounts(*clients: iris.Client) -> dict[str, dict[str, int]]:
    """Return the account of each client's relay, by the relay's id."""
    found = {}
    for each in clients:
        report = await each.status(timeout=PATIENCE_S)
        dropped = sum(report["accounts"]["dropped"].values())
        found[report["relay"]] = {**report["accounts"], "dropped": dropped}
    return found


PROGRAMS = """(wanted) => {
    const shown = [...document.querySelectorAll('#programs-table tbody th')].map((cell) => cell.textContent);
    return wanted.every((name) => shown.some((each) => each.startsWith(name)))
        && shown.every((each) => each === '__main__.py' || wanted.some((name) => each.startsWith(name)));
}"""
"""Whether the programs of this test are shown, and those of the test before are not any more."""


def orders(delay_s: float = 0.0, **settings: Any) -> iris.Service:
    """A service whose handlers take this long."""
    service = iris.Service("orders", **settings)

    @service.on_request
    async def price(payload: bytes) -> bytes:
        await asyncio.sleep(delay_s)
        return payload

    @service.on_push
    async def order(payload: bytes) -> None:
        await asyncio.sleep(delay_s)

    return service


@contextlib.asynccontextmanager
async def load(*callers: iris.Client) -> AsyncIterator[None]:
    """Have callers send requests, and publish to nobody, as long as the block runs."""

    async def call(caller: iris.Client) -> None:
        while True:
            await caller.request("orders", b"x", timeout=PATIENCE_S)
            await caller.publish("nobody.listens", b"x")

    async with running([call(caller) for caller in callers]):
        yield


@pytest.fixture(scope="module")
def relay(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    """A relay for the tests that do not end it."""
    with Daemon(tmp_path_factory.mktemp("relay")) as daemon:
        yield daemon


@pytest.fixture(scope="module")
def dashboard(tmp_path_factory: pytest.TempPathFactory, relay: Daemon) -> Iterator[Dashboard]:
    with Dashboard(tmp_path_factory.mktemp("page"), relay.socket) as dashboard:
        yield dashboard


async def test_the_numbers_on_the_page_are_the_accounts_of_two_relays_under_load(
    tmp_path: Path, pages: Pages
) -> None:
    with linked_hosts(tmp_path) as (one, two), Dashboard(tmp_path / "page", one.socket, "--also", str(two.socket), keys=False) as dashboard:  # fmt: skip
        async with client(one.socket) as a, client(two.socket) as b, a.serve(orders()):
            await b.wait_for_members("orders", 1, timeout=PATIENCE_S)
            before = await accounts(a, b)
            async with load(a, b):
                page = await (await pages.open(dashboard.url)).shown()
                await page.wait("() => [...document.querySelectorAll('#account-table tbody tr')].filter((row) => row.cells[1].textContent.length > 3).length === 2")  # fmt: skip
                shown = {row["key"]: numbers(row) for row in await page.table("account")}
                after = await accounts(a, b)
                for relay, known in shown.items():
                    for word in ACCOUNT[:-1]:
                        assert before[relay][word] <= known[word] <= after[relay][word], word
                    assert known["in"] + known["copied"] == sum(known[word] for word in ACCOUNT[2:])
                for row in await page.table("relays"):
                    assert float(row["In/s"].replace(",", "")) > 0
            await b.request("orders", b"the last", timeout=PATIENCE_S)
            final = await accounts(a, b)
            await page.wait("""(wanted) => [...document.querySelectorAll('#account-table tbody tr')].every(
                (row) => row.cells[1].textContent === wanted[row.dataset.key])""", {relay: f"{known['in']:,}" for relay, known in final.items()})  # fmt: skip
            assert {row["key"]: numbers(row) for row in await page.table("account")} == final
            assert await page.table("drops") == []
            assert sum(known["unwanted"] for known in final.values()) > 0


async def test_a_killed_relay_turns_red(tmp_path: Path, pages: Pages) -> None:
    with (
        linked_hosts(tmp_path) as (one, two),
        Dashboard(tmp_path / "page", one.socket) as dashboard,
    ):
        page = await (await pages.open(dashboard.url)).shown()
        await page.wait("() => document.querySelectorAll('#relays-table tbody tr').length === 2")
        assert await page.tab.locator("#relays-table tr[data-state=bad]").count() == 0
        two.stop(signal.SIGKILL)
        row = page.tab.locator("#relays-table tr[data-state=bad]")
        await row.wait_for()
        colour = await row.locator("th").evaluate("(cell) => getComputedStyle(cell.firstElementChild).color")  # fmt: skip
        assert colour == "rgb(196, 32, 28)"
        assert await page.tab.locator("#drawing .host[data-state=bad]").count() == 1
        assert "was lost" in await page.text("#alerts") or "away" in await page.text("#alerts")
        await page.wait("() => /away/.test(document.querySelector('#relays-table tr[data-state=bad]').textContent)")  # fmt: skip


async def test_who_is_slow_is_named_with_the_reason(
    relay: Daemon, dashboard: Dashboard, pages: Pages
) -> None:
    async with (
        named(relay, "quick.py") as quick,
        named(relay, "late.py") as late,
        quick.serve(orders()),
        late.serve(orders(10.0, limits=iris.Limits(concurrency=1))),
    ):
        await quick.wait_for_members("orders", 2, timeout=PATIENCE_S)
        page = await (await pages.open(dashboard.url)).shown()
        (slow,) = [m.member for m in await quick.members("orders", timeout=5) if m.label == "late.py"]  # fmt: skip
        for _ in range(8):
            await quick.push("orders", b"x", member=slow, timeout=5)
        await page.wait("() => /late.py/.test(document.querySelector('#slow-table').textContent)")
        (row,) = [row for row in await page.table("slow") if row["Who"].startswith("late.py")]
        assert row["Who"].startswith("late.py ")
        assert row["Why"].startswith("queue of ")
        assert row["Cluster or stream"] == "orders"
        assert "late.py of orders: queue of " in await page.text("#alerts")
        await page.tab.get_by_role("button", name="orders").click()
        await page.wait("() => [...document.querySelectorAll('#clusters-table tr.member')].some((row) => /late.py.*queue of /.test(row.textContent))")  # fmt: skip


async def test_names_with_markup_and_escapes_are_shown_as_text(
    relay: Daemon, dashboard: Dashboard, pages: Pages
) -> None:
    hostile = "<img src=x onerror=alert(1)>\x1b[31m</td><script>alert(2)</script>"
    async with named(relay, hostile) as program, program.serve(orders()):
        page = await pages.open(dashboard.url)
        await page.wait(PROGRAMS, ["<img"])
        await page.tab.locator("button.open").click()
        await page.wait("() => document.querySelector('#clusters-table tr.member th')?.textContent.startsWith('<img')")  # fmt: skip
        labels = [row["Program"] for row in await page.table("programs")]
        (label,) = [each for each in labels if "img" in each]
        assert label.startswith("<img src=x onerror=alert(1)>")
        assert label.isprintable()
        assert "<script>" in label
        assert await page.tab.locator("main img, main script").count() == 0
        (_, member) = await page.table("clusters")
        assert "<script>" in member["Cluster"]


async def test_a_page_without_a_valid_token_shows_nothing_and_asks_for_one(
    relay: Daemon, dashboard: Dashboard, pages: Pages
) -> None:
    pages.expected = ("401",)
    page = await pages.open(dashboard.address + "/")
    await page.tab.locator("#door").wait_for()
    assert not await page.tab.locator("#page").is_visible()
    await page.tab.locator("#token").fill("a wrong one")
    await page.tab.keyboard.press("Enter")
    await page.wait("() => /not valid/.test(document.querySelector('#door-why').textContent)")
    await page.tab.locator("#token").fill(dashboard.token)
    await page.tab.keyboard.press("Enter")
    await page.shown()
    assert not await page.tab.locator("#door").is_visible()


async def test_the_token_leaves_the_address_and_is_kept_for_the_tab(
    relay: Daemon, dashboard: Dashboard, pages: Pages
) -> None:
    page = await pages.open(dashboard.url)
    asked: list[str] = []
    page.tab.on("request", lambda request: asked.append(request.url))
    await page.shown()
    assert page.tab.url == dashboard.address + "/"
    await page.tab.reload()
    await page.shown()
    assert not any(dashboard.token in url for url in asked)


async def test_a_dashboard_without_a_relay_says_so_and_goes_on_when_it_comes(
    tmp_path: Path, pages: Pages
) -> None:
    relay = Daemon(tmp_path)
    with Dashboard(tmp_path / "page", relay.socket) as dashboard:
        page = await pages.open(dashboard.url)
        await page.wait(
            "() => /Relay .* is away/.test(document.querySelector('#alerts').textContent)"
        )
        assert await page.tab.locator("#relays-table tr[data-state=bad]").count() == 1
        with relay:
            await page.wait("() => document.querySelector('#relays-table tr[data-state=\"\"]')")
            await page.wait("() => document.querySelector('#live').dataset.state === 'live'")
            await page.shown()
            assert "is away" not in await page.text("#alerts")


async def test_a_page_goes_on_with_a_dashboard_that_was_restarted(
    tmp_path: Path, pages: Pages
) -> None:
    with Daemon(tmp_path) as relay:
        with Dashboard(tmp_path / "page", relay.socket, token_file=True) as dashboard:
            page = await (await pages.open(f"{dashboard.url}#token={TOKEN}")).shown()
            port = int(dashboard.address.rpartition(":")[2])
        await page.wait("() => document.querySelector('#live').dataset.state === 'lost'")
        assert "does not answer" in await page.text("#live")
        with Dashboard(tmp_path / "page", relay.socket, token_file=True, port=port):
            await page.wait("() => document.querySelector('#live').dataset.state === 'live'")


async def test_the_page_can_be_used_by_keyboard_alone(
    relay: Daemon, dashboard: Dashboard, pages: Pages
) -> None:
    focused = "document.activeElement"
    async with named(relay, "shop.py") as program, program.serve(orders()):
        page = await (await pages.open(dashboard.url)).shown()
        await page.wait(PROGRAMS, ["shop.py"])
        await page.wait("() => document.querySelector('#clusters-table tbody tr')?.cells[1].textContent === '1'")  # fmt: skip
        await page.wait("() => document.querySelector('button.open')")
        press = page.tab.keyboard.press
        await press("2")
        assert await page.tab.evaluate(f"{focused}.id") == "clusters"
        await press("j")
        assert await page.tab.evaluate(f"{focused}.cells[0].textContent") == "orders"
        await press("Enter")
        await page.wait("() => document.querySelectorAll('#clusters-table tbody tr').length === 2")
        await press("j")
        assert "shop.py" in await page.tab.evaluate(f"{focused}.cells[0].textContent")
        await press("k")
        await press("Enter")
        assert len(await page.table("clusters")) == 1
        await press("/")
        await page.tab.keyboard.type("shop.py")
        assert {row["Program"] for row in await page.table("programs")} == {"shop.py"}
        assert await page.tab.locator("#drops-table").is_hidden()
        await press("Escape")
        assert await page.tab.locator("#filter").input_value() == ""
        assert len(await page.table("programs")) > 1
        await press("?")
        assert await page.tab.locator("#help").is_visible()
        await press("Escape")
        assert await page.tab.locator("#help").is_hidden()
        await press("f")
        assert await page.text("#live") == "frozen"
        await press("f")
        await page.wait("() => document.querySelector('#live').dataset.state === 'live'")
        await page.tab.evaluate("document.activeElement.blur()")
        names = []
        for _ in range(40):
            await press("Tab")
            names.append(await page.tab.evaluate(f"{focused}.textContent || {focused}.id"))
            outlined = await page.tab.evaluate(f"getComputedStyle({focused}).outlineStyle")
            assert outlined == "solid" or names[-1] == await page.tab.evaluate(
                "document.body.textContent"
            )
        assert {"Clusters", "Freeze", "filter", "orders", "p99"} <= set(names)


async def test_columns_sort_and_rows_keep_their_focus_while_the_page_is_live(
    relay: Daemon, dashboard: Dashboard, pages: Pages
) -> None:
    async with (
        named(relay, "a.py") as one,
        named(relay, "b.py") as two,
        one.subscribe("x", print),
    ):
        await two.wait_for_subscribers("x", 1, timeout=PATIENCE_S)
        page = await (await pages.open(dashboard.url)).shown()
        sort = page.tab.locator("#programs-table").get_by_role("button", name="Program")
        await page.wait(PROGRAMS, ["a.py", "b.py"])
        await sort.click()
        names = [row["Program"] for row in await page.table("programs")]
        assert names == sorted(names)
        assert await page.tab.locator("#programs-table th[aria-sort=ascending]").count() == 1
        await sort.click()
        assert [row["Program"] for row in await page.table("programs")] == names[::-1]
        await page.tab.locator("#programs-table tbody tr").first.focus()
        serial = await page.tab.evaluate("document.querySelector('#tiles').textContent")
        await two.publish("x", b"")
        await page.wait("(old) => document.querySelector('#tiles').textContent !== old", serial)
        assert await page.tab.evaluate("document.activeElement.tagName") == "TR"


async def test_dead_letters_are_looked_at_and_redriven_and_each_change_is_asked_for_again(
    tmp_path: Path, pages: Pages
) -> None:
    hostile = b"<img src=x onerror=alert(1)>\x1b[31m"
    with Daemon(tmp_path, "--data", str(tmp_path / "data")) as relay, Dashboard(tmp_path / "page", relay.socket) as dashboard:  # fmt: skip
        async with named(relay, "invoices.py") as program:
            streams = program.streams
            await streams.create("orders", timeout=PATIENCE_S)
            await streams.append("orders", hostile)
            await streams.append("orders", bytes(range(256)))
            await streams.append("orders", {"sku": "a", "left": 0})
            async with streams.consumer("orders", "invoices", shared=True, max_deliver=1) as work:
                for _ in range(3):
                    work.nack(await anext(work), reason="no <b>such</b> customer")
                await work.flush()

            page = await (await pages.open(dashboard.url)).shown()
            row = page.tab.locator("#consumers-table tbody tr")
            await row.get_by_role("button", name="Peek").click()
            await page.wait("() => document.querySelectorAll('#peek-table tbody tr').length === 3")
            first, second, third = await page.table("peek")
            assert first["Payload"].startswith("<img src=x onerror=alert(1)>?[31m")
            assert first["Why"].startswith("no <b>such</b> customer")
            assert second["Payload"].startswith("00 01 02")
            assert third["Payload"].startswith('{"sku":"a","left":0}')
            assert await page.tab.locator("#peek img, #peek b").count() == 0
            await page.tab.keyboard.press("Escape")

            await row.get_by_role("button", name="Redrive").click()
            assert "3 dead letters" in await page.text("#ask-text")
            await page.tab.keyboard.press("Enter")  # on Cancel, which has the focus
            await page.tab.locator("#ask").wait_for(state="hidden")
            assert len(await streams.dead_letters("orders", "invoices")) == 3
            await row.get_by_role("button", name="Redrive").click()
            await page.tab.locator("#ask-yes").click()
            await page.wait(
                "() => /3 messages will be delivered/.test(document.querySelector('#said').textContent)"
            )
            assert await streams.dead_letters("orders", "invoices") == []

            await row.get_by_role("button", name="Pause").click()
            await page.tab.locator("#ask-yes").click()
            await row.get_by_text("paused").wait_for()
            (known,) = await streams.consumers("orders")
            assert known.paused
            await row.get_by_role("button", name="Resume").click()
            await page.tab.locator("#ask-yes").click()
            await row.get_by_role("button", name="Pause").wait_for()
            async with streams.consumer("orders", "invoices", shared=True, max_deliver=1) as work:
                assert (await anext(work)).payload == hostile


async def test_a_page_of_a_read_only_dashboard_has_nothing_to_press(
    tmp_path: Path, pages: Pages
) -> None:
    with Daemon(tmp_path, "--data", str(tmp_path / "data")) as relay, Dashboard(tmp_path / "page", relay.socket, "--read-only") as dashboard:  # fmt: skip
        async with named(relay, "invoices.py") as program:
            await program.streams.create("orders", timeout=PATIENCE_S)
            await program.streams.append("orders", b"")
            async with program.streams.consumer("orders", "invoices", shared=True) as work:
                work.ack(await anext(work))
                page = await (await pages.open(dashboard.url)).shown()
                await page.wait(
                    "() => document.querySelectorAll('#consumers-table tbody tr').length === 1"
                )
                assert await page.tab.locator("#consumers-table tbody button").count() == 0
                assert await page.text("#live") == "live, read-only"


CONTRAST = """() => {
    const parse = (text) => { const [r, g, b, a = 1] = text.match(/[\\d.]+/g).map(Number); return text.startsWith('color(srgb') ? [r * 255, g * 255, b * 255, a] : [r, g, b, a]; };
    const light = ([r, g, b]) => [r, g, b].map((v) => (v /= 255) <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4)
        .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
    const behind = (element) => {
        for (let each = element; each; each = each.parentElement) {
            const colour = parse(getComputedStyle(each).backgroundColor);
            if (colour[3] > 0.99) return colour;
        }
        return [255, 255, 255];
    };
    const low = [];
    for (const element of document.querySelectorAll('body *')) {
        const own = [...element.childNodes].some((node) => node.nodeType === 3 && node.textContent.trim());
        if (!own || !element.checkVisibility() || element.closest('svg, .visually-hidden, .skip, dialog')) continue;
        const [a, b] = [light(parse(getComputedStyle(element).color)), light(behind(element))].sort((x, y) => y - x);
        const ratio = (a + 0.05) / (b + 0.05);
        if (ratio < 4.5) low.push(`${element.tagName} ${element.className} ${ratio.toFixed(2)} ${element.textContent.slice(0, 30)}`);
    }
    return low;
}"""
"""Texts whose contrast is below 4.5, which is too low to read (WCAG AA)."""


CUT_OFF = """() => [...document.querySelectorAll('main *')].filter((each) => each.checkVisibility() && !each.closest('svg, .scroll')
    && each.getBoundingClientRect().right > innerWidth + 1).map((each) => each.outerHTML.slice(0, 80))"""
SIDEWAYS = """() => [...document.querySelectorAll('.scroll')].filter((each) => each.scrollWidth > each.clientWidth + 1)
    .map((each) => each.innerHTML.slice(0, 60))"""


async def test_the_page_can_be_read_on_every_screen(tmp_path: Path, pages: Pages) -> None:
    """On a wide and on a small screen, in light and in dark mode, with a relay that was lost."""
    with linked_hosts(tmp_path) as (one, two), Dashboard(tmp_path / "page", one.socket) as dashboard:  # fmt: skip
        async with named(one, "shop.py") as program, program.serve(orders()):
            opened = [
                (width, dark, await pages.open(dashboard.url, width=width, dark=dark))
                for width in (1280, 375)
                for dark in (False, True)
            ]
            for *_, page in opened:
                await page.shown()
                await page.wait("() => document.querySelector('button.open')")
                await page.tab.locator("button.open").click()
            two.stop(signal.SIGKILL)
            for width, dark, page in opened:
                await page.tab.locator("#relays-table tr[data-state=bad]").wait_for()
                assert await page.tab.evaluate(CONTRAST) == []
                assert await page.tab.evaluate("document.documentElement.scrollWidth") == width
                background = await page.tab.evaluate(
                    "getComputedStyle(document.body).backgroundColor"
                )
                assert background == ("rgb(18, 19, 23)" if dark else "rgb(247, 247, 248)")
                assert await page.tab.evaluate(CUT_OFF) == []
                if width == 375:  # rows are cards there, so nothing scrolls sideways
                    assert await page.tab.evaluate(SIDEWAYS) == []


SLOW = """
import asyncio
import sys
import iris

async def slow(message):
    await asyncio.sleep(1000)

async def main():
    keyring = iris.Keyring.single(iris.ClusterKey(bytes(range(32))))
    config = iris.ClientConfig(relay=sys.argv[1], label="ticker")
    async with iris.connect(keyring=keyring, config=config) as client:
        async with client.subscribe("ticks", slow, limit_bytes=2000):
            print("ready", flush=True)
            await asyncio.sleep(1000)

asyncio.run(main())
"""


async def test_the_only_host_is_drawn_with_its_clusters(
    pages: Pages, relay: Daemon, dashboard: Dashboard
) -> None:
    async with (
        client(relay.socket) as one,
        client(relay.socket) as two,
        one.serve(orders()),
        two.serve(orders()),
    ):
        page = await (await pages.open(dashboard.url)).shown()
        drawn = page.tab.locator("#drawing [data-cluster=orders] text")
        await page.wait(
            "() => document.querySelector('#drawing [data-cluster=orders] text')?.textContent === 'orders 2'"
        )
        assert await drawn.count() == 1
        assert await page.tab.locator("#drawing [data-host]").count() == 1
        label = await page.tab.locator("#drawing svg").get_attribute("aria-label")
        assert label is not None
        assert label.startswith("Map of 1 host with ")


async def test_a_program_that_loses_messages_and_one_that_fails_need_attention(
    pages: Pages, relay: Daemon, dashboard: Dashboard
) -> None:
    service = iris.Service("failing")

    @service.on_request
    async def fail(payload: bytes) -> bytes:
        raise ValueError("a bug")

    ticker = await asyncio.create_subprocess_exec(
        sys.executable, "-c", SLOW, str(relay.socket), stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )  # fmt: skip
    try:
        assert ticker.stdout is not None
        assert await ticker.stdout.readline() == b"ready\n"
        async with client(relay.socket) as member, client(relay.socket) as caller, member.serve(service):  # fmt: skip
            for _ in range(20):
                await caller.publish("ticks", bytes(1000))
                await caller.flush()
            with contextlib.suppress(iris.RemoteError):
                await caller.request("failing", b"x", timeout=PATIENCE_S)
            page = await (await pages.open(dashboard.url)).shown()
            await page.wait("""() => {
                const said = [...document.querySelectorAll('#alerts li')].map((each) => each.textContent);
                return said.some((text) => /^Program ticker .*: lost \\d+ messages of ticks: its own queue was full/.test(text))
                    && said.some((text) => /1 call of failing failed/.test(text));
            }""")
            rows = {row["Process"]: row for row in await page.table("programs")}
            assert int(rows[str(ticker.pid)]["Lost"]) >= 17
    finally:
        with contextlib.suppress(ProcessLookupError):
            ticker.kill()
        await ticker.wait()
