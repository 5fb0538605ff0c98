"""The site of the documentation: it builds without warnings, its links work, and nothing is missing on it."""

from __future__ import annotations

import importlib
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml

import iris
from iris.cli import VERBS, load

ROOT = Path(__file__).parents[2]
HERE = ROOT / "docs" / "site"
CONFIG = yaml.unsafe_load((HERE / "mkdocs.yml").read_text("utf-8"))


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Return a function that imports a module of docs/site."""
    monkeypatch.syspath_prepend(str(HERE))
    before = set(sys.modules)
    yield importlib.import_module
    for name in set(sys.modules) - before:
        if name in ("build", "links", "reference", "staging"):
            del sys.modules[name]


def entries(nav: Any) -> Iterator[str]:
    """Yield the pages and folders of a nav."""
    match nav:
        case list():
            for each in nav:
                yield from entries(each)
        case dict():
            yield from entries(list(nav.values()))
        case _:
            yield nav


def test_every_page_of_docs_is_in_the_nav_once(module: Any) -> None:
    place = module("staging").place
    pages = [path for path in (ROOT / "docs").rglob("*.md") if "decisions" not in path.parts]
    pages += [ROOT / name for name in ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md")]  # fmt: skip
    names = [place(str(path.relative_to(ROOT))) for path in pages]
    listed = [entry for entry in entries(CONFIG["nav"]) if not entry.startswith("reference/")]
    assert sorted(listed) == sorted([*names, "decisions"]), "list each in docs/site/mkdocs.yml"


@pytest.mark.timeout(120)
def test_the_site_builds_without_warnings_and_every_link_leads_somewhere(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, HERE / "build.py", tmp_path / "docs"], capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) == (0, "")
    page = (tmp_path / "docs" / "site" / "reference" / "api" / "client" / "index.html").read_text()
    assert 'id="iris.Client.request"' in page
    assert "Raises" in page


def test_a_link_without_a_page_or_an_anchor_and_what_another_host_has_to_send_are_found(
    module: Any, tmp_path: Path
) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "index.html").write_text('<h1 id="here">A</h1><a href="../b/">b</a>')
    (tmp_path / "index.html").write_text(
        '<a href="a/#here">a</a><a href="a/#there">a</a><a href="https://other.example/">o</a>'
        '<script src="https://cdn.example/x.js"></script><img src="x.png">'
    )
    (tmp_path / "x.css").write_text("@import url(//fonts.example/f.css); b { c: url(data:image/x) }")  # fmt: skip
    assert sorted(module("links").wrong_links(tmp_path)) == [
        "a/index.html: ../b/ leads to no page",
        "index.html: a/#there leads to no anchor of its page",
        "index.html: loads https://cdn.example/x.js from another host",
        "index.html: x.png leads to no page",
        "x.css: loads url(//fonts.example/f.css from another host",
    ]


def test_a_link_to_a_file_that_is_not_there_stops_the_build(module: Any) -> None:
    staging = module("staging")
    with pytest.raises(staging.BrokenLink, match=r"docs/x\.md: links to gone\.md"):
        staging.converted("docs/x.md", "See [it](gone.md).\n")


def test_links_to_pages_and_sources_become_links_of_the_site(module: Any) -> None:
    text = "[a](../README.md#hello) [b](../examples/hello.py) [c](decisions/README.md)\n```\n[d](x.md)\n```\n"
    assert module("staging").converted("docs/x.md", text) == (
        "[a](overview.md#hello) [b](source/examples/hello.py.md) [c](decisions/index.md)\n```\n[d](x.md)\n```\n"
    )


def test_every_public_name_has_a_place_in_the_reference(module: Any) -> None:
    reference = module("reference")
    placed = [name for _, _, names in reference.NAMES.values() for name in names]
    assert sorted(placed) == sorted(iris.__all__), "list each in NAMES of docs/site/reference.py"
    for name, names in reference.MODULES.items():
        found = importlib.import_module(name)
        assert set(names) >= set(getattr(found, "__all__", ())) - set(iris.__all__) - {"SparkError"}
        assert all(hasattr(found, each) for each in names)


def test_every_verb_and_each_of_its_options_is_in_the_reference(module: Any) -> None:
    pages = dict(module("reference").command_pages())
    assert list(pages) == ["iris", *VERBS]
    for verb in VERBS:
        for path, command in commands(f"iris {verb}", load(verb)):
            _, heading, text = f"\n{pages[verb]}".partition(f" {path}\n")
            assert heading, path
            text = re.split(r"^#+ iris", text, flags=re.M)[0]
            help_ = command.get_help(command.context_class(command, info_name=path))
            flags = set(re.findall(r"(?<![\w-])--[a-z][\w-]+", help_)) - {"--help"}
            assert {flag for flag in flags if flag not in text} == set(), path


def commands(path: str, command: Any) -> Iterator[tuple[str, typer.core.TyperCommand]]:
    """Yield a command and its sub-commands, each with what has to be typed for it."""
    yield path, command
    for name, sub in getattr(command, "commands", {}).items():
        yield from commands(f"{path} {name}", sub)


def test_every_word_of_the_glossary_is_on_its_page(module: Any) -> None:
    page = module("reference").words_page()
    words = re.findall(r"^    (\S.*?) {2,}\S", iris.__doc__ or "", re.M)
    assert len(words) > 60
    assert all(f"| {word} |" in page for word in words)
    assert page.count("\n## ") == 5


def test_every_metric_of_the_code_is_on_its_page(module: Any) -> None:
    page = module("reference").metrics_page()
    served = {
        name
        for path in (*(ROOT / "iris").rglob("*.py"), *(ROOT / "relay").rglob("*.py"))
        for name in re.findall(r'(?:Spec|Histogram)\(\s*"(iris_\w+)"', path.read_text("utf-8"))
    }
    assert len(served) > 90
    assert {name for name in served if f"`{name}`" not in page} == set()
