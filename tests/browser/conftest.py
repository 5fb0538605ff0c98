"""A browser that tests drive: Debian's chromium, by Playwright. All tests here share one event loop with it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from browser.kit import CHROMIUM, Pages
from interop.js.conftest import built as built
from interop.js.conftest import run_node as run_node
from support.required import cannot

TIMEOUT_S = 120
HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.asyncio(loop_scope="session"))
            if item.get_closest_marker("timeout") is None:
                item.add_marker(pytest.mark.timeout(TIMEOUT_S))


@pytest.fixture(scope="session", autouse=True)
def _browser_installed() -> None:
    reason = "" if CHROMIUM else "chromium is not installed (apt-get install chromium)"
    try:
        import playwright  # noqa: F401 - only whether it is there
    except ImportError as err:
        reason = str(err)
    if reason:
        cannot("BROWSER", f"no tests in a browser: {reason}")


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def browser(_browser_installed: None) -> AsyncIterator[object]:
    """One browser for all tests; each page has a profile of its own."""
    from playwright.async_api import async_playwright

    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=CHROMIUM)
        yield browser
        await browser.close()


@pytest_asyncio.fixture(loop_scope="session")
async def pages(browser: object) -> AsyncIterator[Pages]:
    """Opens pages, and closes them after the test. Fails if a page had an error, or asked another host."""
    pages = Pages(browser)
    yield pages
    await pages.close()
