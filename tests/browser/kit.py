"""Pages of a dashboard in a browser, and the relays that they show."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
from collections.abc import AsyncIterator, Coroutine, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Self

from support.links import Host
from support.relays import KEY, Daemon
from support.waiting import PATIENCE_S

import iris

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
READ_TABLE = """(table) => {
    const titles = [...table.tHead.rows[0].cells].map((cell) => cell.textContent);
    return [...table.tBodies[0].rows].map((row) =>
        Object.fromEntries([["key", row.dataset.key], ...[...row.cells].map((cell, index) => [titles[index], cell.textContent])]));
}"""


class Pages:
    """The pages of one test."""

    def __init__(self, browser: Any) -> None:
        self._browser = browser
        self._contexts: list[Any] = []
        self.errors: list[str] = []
        """Errors of scripts, refusals of the policy, and requests to other hosts."""
        self.expected: tuple[str, ...] = ()
        """Parts of errors that the test causes."""

    async def open(self, url: str, *, width: int = 1280, height: int = 900, dark: bool = False, scale: float = 1, instead: Mapping[str, str] | None = None) -> Page:  # fmt: skip
        """`instead` holds scripts that the page gets in place of the server's: name of the file -> its text."""
        context = await self._browser.new_context(
            viewport={"width": width, "height": height}, color_scheme="dark" if dark else "light",
            device_scale_factor=scale, reduced_motion="reduce",
        )  # fmt: skip
        self._contexts.append(context)
        tab = await context.new_page()
        tab.set_default_timeout(PATIENCE_S * 1000)
        host = url.split("/")[2]
        tab.on("pageerror", lambda error: self.errors.append(f"error: {error}"))
        tab.on("console", self._hear)
        tab.on("request", lambda asked: self.errors.append(f"asked: {asked.url}") if asked.url.split("/")[2] != host else None)  # fmt: skip
        for name, text in (instead or {}).items():
            await tab.route(f"**/{name}", partial(_give, text))
        await tab.goto(url)
        return Page(tab)

    def _hear(self, said: Any) -> None:
        # A dashboard that stops ends its streams, which the browser calls an error.
        if said.type == "error" and "net::ERR_" not in said.text:
            self.errors.append(f"console: {said.text}")

    async def close(self) -> None:
        for context in self._contexts:
            await context.close()
        errors = [each for each in self.errors if not any(part in each for part in self.expected)]
        assert errors == [], errors


async def _give(text: str, route: Any) -> None:
    await route.fulfill(body=text, content_type="text/javascript")


class Page:
    """One page of a dashboard. `tab` is Playwright's."""

    def __init__(self, tab: Any) -> None:
        self.tab = tab

    async def shown(self) -> Self:
        """Wait until the page shows a network that it has rates of."""
        await self.tab.wait_for_function("() => !document.querySelector('#page').hidden && /[0-9]/.test(document.querySelector('#tiles dd')?.textContent)")  # fmt: skip
        return self

    async def table(self, name: str) -> list[dict[str, str]]:
        """Return the rows of a table: title of the column -> text; "key" is what tells rows apart."""
        rows: list[dict[str, str]] = await self.tab.evaluate(f"() => ({READ_TABLE})(document.querySelector('#{name}-table'))")  # fmt: skip
        return rows

    async def wait(self, script: str, argument: object = None) -> None:
        """Wait until a JavaScript function is true of the page."""
        await self.tab.wait_for_function(script, arg=argument)

    async def text(self, selector: str) -> str:
        text: str = await self.tab.locator(selector).inner_text()
        return text


@contextlib.contextmanager
def linked_hosts(directory: Path, *arguments: str) -> Iterator[tuple[Daemon, Daemon]]:
    """Run two relays in processes of their own; the second joins the first, which gets the arguments."""
    one = Host(directory / "one", *arguments)
    with one.daemon:
        two = Host(directory / "two", "--join", one.address)
        with two.daemon:
            yield one.daemon, two.daemon


def named(relay: Daemon, label: str) -> iris.Client:
    """Return a client that is shown by this name."""
    config = iris.ClientConfig(relay=relay.socket, label=label)
    return iris.connect(keyring=iris.Keyring.single(KEY), config=config)


@contextlib.asynccontextmanager
async def running(works: list[Coroutine[Any, Any, None]]) -> AsyncIterator[None]:
    """Run works until the block ends."""
    tasks = [asyncio.create_task(work) for work in works]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
