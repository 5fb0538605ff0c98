"""What people read stays readable: short lines, docstrings that are sentences, plain words, working links."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
WIDTH = 120
FOLDERS = ("iris", "relay", "pyspark_iris", "pytest_iris", "examples", "bench", "tests", "docs")
MODULES = sorted(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py"))
PAGES = sorted(
    path
    for path in (*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "bench").glob("*.md"))
)
DANGLING = re.compile(r"[\"'](?:\\[nt]?|\s)*(?:Of|By) ")
"""What may be the beginning of a docstring that refers to the name above it."""
RIDDLES = re.compile(r"\b(?:is|are) no (?!longer\b|more\b)\w+|\banew\b|\bthe own host\b", re.I)
"""Phrases that readers had to read twice; "there is no …" is plain."""


def docstrings(tree: ast.Module) -> Iterator[ast.Constant]:
    """Yield every string that stands alone as a statement: of modules, classes, functions and attributes."""
    for node in ast.walk(tree):
        body = getattr(node, "body", ())
        for statement in body if isinstance(body, list) else ():
            match statement:
                case ast.Expr(value=ast.Constant(value=str()) as text):
                    yield text


def comments(source: str) -> Iterator[tuple[int, str]]:
    """Yield the line and the text of every comment, unless it is for a tool."""
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT and not re.match(r"# (?:fmt|type|noqa)", token.string):
            yield token.start[0], token.string


def prose(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the number and text of each line of a page that is prose: not code, not a table."""
    fenced = False
    for number, line in enumerate(path.read_text("utf-8").splitlines(), 1):
        if line.lstrip().startswith("```"):
            fenced = not fenced
        elif not (fenced or line.startswith(("|", "    ", "\t"))):
            yield number, line


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(ROOT)))
def test_docstrings_and_comments_of_a_module_are_sentences_on_short_lines(path: Path) -> None:
    source = path.read_text("utf-8")
    lines = source.splitlines()
    wrong: list[str] = []
    # Most modules have nothing that could be wrong; to parse them costs more than all else here.
    wide = [line for line in lines if len(line) > WIDTH]
    riddle = RIDDLES.search(" ".join(source.split()))
    parsed = wide or riddle or DANGLING.search(source)
    for text in docstrings(ast.parse(source)) if parsed else ():
        if re.match(r"\s*(?:Of|By) ", text.value):
            wrong.append(f"{text.lineno}: a dangling docstring: {text.value.splitlines()[0]}")
        for number in range(text.lineno, (text.end_lineno or text.lineno) + 1):
            if len(lines[number - 1]) > WIDTH:
                wrong.append(f"{number}: a line of {len(lines[number - 1])} columns")
        wrong += [f"{text.lineno}: {found}" for found in riddles(text.value)]
    split = riddle or any(line.lstrip().startswith("#") for line in wide)
    for number, comment in comments(source) if split else ():
        # Behind code the formatter owns the width; a comment of its own has a line to itself.
        if lines[number - 1].lstrip().startswith("#") and len(lines[number - 1]) > WIDTH:
            wrong.append(f"{number}: a comment of {len(lines[number - 1])} columns")
        wrong += [f"{number}: {found}" for found in riddles(comment)]
    assert wrong == [], wrong


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_page_has_short_lines_and_plain_words(path: Path) -> None:
    lines = list(prose(path))
    wide = [
        f"{number}: a line of {len(line)} columns" for number, line in lines if len(line) > WIDTH
    ]
    assert wide + riddles(" ".join(line for _, line in lines)) == []


def riddles(text: str) -> list[str]:
    """Return the phrases of a text that want another wording."""
    text = " ".join(text.split())
    return [
        found.group()
        for found in RIDDLES.finditer(text)
        if not re.search(r"\bthere $", text[: found.start()], re.I)
    ]


def anchors(path: Path) -> set[str]:
    """Return the anchors of a page's headings, as GitHub and most site builders make them."""
    found: set[str] = set()
    for _, line in prose(path):
        if heading := re.match(r"#+ (.*)", line):
            plain = re.sub(r"[^\w\- ]", "", heading.group(1).lower())
            found.add(plain.strip().replace(" ", "-"))
    return found


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_of_a_page_lead_to_a_file_and_a_heading(path: Path) -> None:
    wrong: list[str] = []
    for link in re.findall(r"\]\(([^)\s]+)\)", "\n".join(line for _, line in prose(path))):
        if re.match(r"[a-z]+:", link):
            continue
        name, _, anchor = link.partition("#")
        target = (path.parent / name).resolve() if name else path
        if not target.exists():
            wrong.append(f"{link}: there is no such file")
        elif anchor and target.suffix == ".md" and anchor not in anchors(target):
            wrong.append(f"{link}: {target.name} has no such heading")
    assert wrong == [], wrong
