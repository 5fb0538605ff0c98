"""Build the site of the documentation: `make docs`, or python docs/site/build.py [FOLDER].

The pages are copied to build/docs/pages with links that work there, the reference is written from the code, zensical
makes HTML of both in build/docs/site, and every link is checked. FOLDER stands for build/docs.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any, Final

import links
import reference
import staging
import yaml

from iris.cli import VERBS

HERE: Final = Path(__file__).parent
WORK: Final = staging.ROOT / "build" / "docs"
SAID: Final = re.compile(r"Build started|No issues found|Build finished in .*")
"""What zensical prints when nothing is wrong. Whatever else is printed, such as a docstring it cannot read, fails."""


def expanded(nav: Any, pages: Path) -> Any:
    """Return a nav in which each folder is replaced by the pages in it."""
    match nav:
        case list():
            entries: list[Any] = []
            for entry in nav:
                if isinstance(entry, str) and (pages / entry).is_dir():
                    entries += expanded(entry, pages)
                else:
                    entries.append(expanded(entry, pages))
            return entries
        case dict():
            return {title: expanded(entry, pages) for title, entry in nav.items()}
        case str() if (pages / nav).is_dir():
            names = sorted(path.name for path in (pages / nav).glob("*.md"))
            names.sort(key=lambda name: name != "index.md")
            if nav == "reference/command":
                names = ["iris.md", *(f"{verb}.md" for verb in VERBS)]
            elif nav == "reference/api":
                names = [f"{name}.md" for name in (*reference.NAMES, *reference.MODULES)]
            return [f"{nav}/{name}" for name in names]
    return nav


def build(work: Path) -> list[str]:
    """Build the site in `work`/site, and return what is wrong with it: each a sentence."""
    shutil.rmtree(work, ignore_errors=True)
    pages = work / "pages"
    try:
        staging.stage(pages)
    except staging.BrokenLink as error:
        return [str(error)]
    reference.write_reference(pages)
    config = yaml.unsafe_load((HERE / "mkdocs.yml").read_text("utf-8"))
    config["nav"] = expanded(config["nav"], pages)
    config["docs_dir"], config["site_dir"] = "pages", "site"
    config["plugins"][1]["mkdocstrings"]["handlers"]["python"]["paths"] = [str(staging.ROOT)]
    (work / "mkdocs.yml").write_text(yaml.dump(config, sort_keys=False), "utf-8")
    command = [
        sys.executable,
        "-P",
        "-m",
        "zensical",
        "build",
        "--clean",
        "--strict",
        "--config-file",
        str(work / "mkdocs.yml"),
    ]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    said = re.sub(r"\x1b\[[0-9;]*m", "", done.stdout)
    if unexpected := [line for line in said.splitlines() if line and not SAID.fullmatch(line)]:
        return unexpected
    if done.returncode:
        return [f"zensical failed with code {done.returncode}"]
    return list(links.wrong_links(work / "site"))


def main() -> None:
    """Build, and exit with 1 if something is wrong."""
    work = Path(sys.argv[1]).resolve() if len(sys.argv) > 1 else WORK
    if wrong := build(work):
        sys.exit("\n".join(wrong))
    pages = sum(1 for _ in work.rglob("site/**/*.html"))
    sys.stdout.write(f"{pages} pages in {work / 'site'}\n")


if __name__ == "__main__":
    main()
