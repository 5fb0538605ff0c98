"""Pages of the repository as pages of the site: where each goes, and links that work in both places.

A page links to files by their place in the repository, as GitHub wants it. On the site every file that a page links to
has a page, too: source files and folders are shown as they are.
"""

from __future__ import annotations

import ast
import os
import re
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Final

ROOT: Final = Path(__file__).parents[2]
RENAMED: Final = {
    "README.md": "overview.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security.md",
}
"""Pages outside docs/ -> their names on the site."""
LINK: Final = re.compile(r"(?<=\]\()([^)\s]+)(?=\))")
FENCE: Final = re.compile(r"\s*(`{3,}|~{3,})(\w*)")
PAIR: Final = re.compile(
    r"^([^\n]+:)\n\n(```python\n.*?^```\n)\nIris:\n\n(```python\n.*?^```\n)", re.S | re.M
)
"""Two programs that do the same, which the site shows side by side."""
LANGUAGES: Final = {
    ".py": "python",
    ".sh": "bash",
    ".toml": "toml",
    ".json": "json",
    ".yml": "yaml",
    ".yaml": "yaml",
}


class BrokenLink(Exception):
    """A page links to a file that does not exist in the repository."""


def files_in(folder: str) -> list[str]:
    """Return the files in a folder of the repository, and in its folders, in order."""
    found = (path.relative_to(ROOT) for path in (ROOT / folder).rglob("*") if path.is_file())
    hidden = ("__pycache__", ".")
    return sorted(
        str(path) for path in found if not any(part.startswith(hidden) for part in path.parts)
    )


def place(path: str) -> str:
    """Return the name on the site of a page, a picture, a source file or a folder of the repository."""
    if path in RENAMED:
        return RENAMED[path]
    pure = PurePosixPath(path)
    if (ROOT / path).is_dir():
        return f"source/{path}/index.md"
    inside = pure.relative_to("docs") if pure.is_relative_to("docs") else pure
    if pure.name == "README.md":
        return str(inside.with_name("index.md"))
    if pure.suffix in (".md", ".png"):
        return str(inside)
    return f"source/{path}.md"


def outside_fences(text: str) -> Iterator[tuple[str, bool]]:
    """Yield each line of a page, and whether it is text rather than code between fences."""
    fence = ""
    for line in text.splitlines(keepends=True):
        found = FENCE.match(line)
        if found and not fence:
            fence = found[1]
            yield line, False
        elif found and found[1].startswith(fence):
            fence = ""
            yield line, False
        else:
            yield line, not fence


def linked(path: str, text: str) -> Iterator[tuple[str, str]]:
    """Yield each link of a page to a file of the repository: as it is written, and the file."""
    for line, is_text in outside_fences(text):
        for found in LINK.finditer(line) if is_text else ():
            name, _, _ = found[0].partition("#")
            if name and not re.match(r"[a-z]+:", name):
                yield found[0], os.path.normpath(PurePosixPath(path).parent / name)


def converted(path: str, text: str) -> str:
    """Return a page with the links that it needs on the site, and nested lists as Python-Markdown reads them."""
    here = PurePosixPath(place(path)).parent
    moved = {}
    for link, target in linked(path, text):
        if not (ROOT / target).exists():
            raise BrokenLink(f"{path}: links to {link}, but there is no file {target}")
        _, mark, anchor = link.partition("#")
        moved[link] = os.path.relpath(place(target), here) + mark + anchor
    lines = []
    for line, is_text in outside_fences(text):
        if is_text:
            line = LINK.sub(lambda found: moved.get(found[0], found[0]), line)
            line = re.sub(r"^  (?=- )", "    ", line)
        elif fence := FENCE.match(
            line
        ):  # names of blocks, which tests look for, are not for zensical
            line = fence[0] + "\n"
        lines.append(line)
    return side_by_side("".join(lines))


def side_by_side(text: str) -> str:
    """Return a page whose pairs of programs stand beside each other, and which has the room for that."""
    text, pairs = PAIR.subn(
        '<div class="grid" markdown>\n<div markdown>\n\n\\1\n\n\\2\n</div>\n<div markdown>\n\nIris:\n\n\\3\n</div>\n</div>\n',
        text,
    )
    return f"---\nhide: [navigation, toc]\n---\n{text}" if pairs else text


def shown(path: str) -> str:
    """Return the page of a source file."""
    text = (ROOT / path).read_text("utf-8")
    fence = "`" * max(3, *(len(run) + 1 for run in re.findall("`+", text)), 3)
    language = LANGUAGES.get(PurePosixPath(path).suffix, "text")
    return f"# {path}\n\n{fence}{language}\n{text.rstrip()}\n{fence}\n"


def shown_folder(path: str) -> str:
    """Return the page of a folder: a list of the files in it."""
    here = PurePosixPath(place(path)).parent
    rows = [f"- [{file}]({os.path.relpath(place(file), here)})" for file in files_in(path)]
    return f"# {path}\n\n" + "\n".join(rows) + "\n"


def stage(out: Path) -> None:
    """Write the pages of the repository to `out`, and whatever they link to.

    Raises:
        BrokenLink: a page links to a file that does not exist.
    """
    todo = [*RENAMED, *files_in("docs"), *files_in("examples")]
    done = set()
    while todo:
        path = todo.pop()
        own = path.startswith("docs/") and not path.endswith((".md", ".png"))  # how it was made
        if path in done or own:
            continue
        done.add(path)
        target = out / place(path)
        target.parent.mkdir(parents=True, exist_ok=True)
        if (ROOT / path).is_dir():
            todo += files_in(path)
            target.write_text(shown_folder(path), "utf-8")
        elif path.endswith(".md"):
            text = (ROOT / path).read_text("utf-8")
            target.write_text(converted(path, text), "utf-8")
            todo += [file for _, file in linked(path, text)]
        elif path.endswith(".png"):
            target.write_bytes((ROOT / path).read_bytes())
        else:
            target.write_text(shown(path), "utf-8")


def summary(path: str) -> str:
    """Return the first paragraph of a program's docstring, in one line."""
    text = ast.get_docstring(ast.parse((ROOT / path).read_text("utf-8"))) or ""
    return " ".join(text.split("\n\n")[0].split())
