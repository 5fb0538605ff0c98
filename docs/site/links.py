"""Check a built site: every link leads to a page and an anchor, and nothing is loaded from another host."""

from __future__ import annotations

import re
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Final
from urllib.parse import unquote, urljoin, urlsplit

LOADED: Final = {"img": "src", "script": "src", "link": "href", "iframe": "src", "source": "src"}
"""Elements that a browser loads something for, without being asked -> the attribute that says what."""
NOT_LOADED: Final = ("canonical", "next", "prev", "alternate")
"""Values of rel= of links that a browser does not load."""


class Page(HTMLParser):
    """The anchors of a page, its links, and what a browser loads for it."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.anchors: set[str] = set()
        self.links: list[str] = []
        self.loads: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Note what one element says."""
        given = {name: value or "" for name, value in attrs}
        self.anchors.update(given[name] for name in ("id", "name") if name in given)
        if tag == "a" and given.get("href"):
            self.links.append(given["href"])
        if tag in LOADED and given.get(LOADED[tag]) and given.get("rel") not in NOT_LOADED:
            self.loads.append(given[LOADED[tag]])


def wrong_links(site: Path) -> Iterator[str]:
    """Yield a sentence about each link of the site in `site` that leads nowhere, or that loads from another host."""
    pages = {
        path: Page(path.read_text("utf-8"))
        for path in sorted(site.rglob("*.html"))
        if path.is_file()
    }
    for path, page in pages.items():
        name = path.relative_to(site)
        here = f"/{name}"
        for link in page.loads:
            if urlsplit(link).netloc:
                yield f"{name}: loads {link} from another host"
        # The page for addresses that do not exist is shown at any address, so its links begin at the root.
        for link in [*page.links, *page.loads]:
            if urlsplit(link).scheme or urlsplit(link).netloc:
                continue
            parts = urlsplit(urljoin(here, link))
            target = site / unquote(parts.path).lstrip("/")
            if target.is_dir():
                target /= "index.html"
            if not target.is_file():
                yield f"{name}: {link} leads to no page"
            elif (
                parts.fragment
                and target in pages
                and unquote(parts.fragment) not in pages[target].anchors
            ):
                yield f"{name}: {link} leads to no anchor of its page"
    # A page about a style sheet is a directory with its name.
    for path in sorted(filter(Path.is_file, site.rglob("*.css"))):
        for link in re.findall(
            r"(?:url\(|@import )[\"']?(?:https?:)?//[^\"')]+", path.read_text("utf-8")
        ):
            yield f"{path.relative_to(site)}: loads {link} from another host"
