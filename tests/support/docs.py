"""The commands of a page of the documentation: what it says that they print, and what they do."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Mapping
from pathlib import Path

from support.waiting import PATIENCE_S


def sessions(page: str) -> list[tuple[str, str]]:
    """Return each command of a page with the output that the page shows; "…" stands for any text."""
    found: list[tuple[str, str]] = []
    for block in re.findall(r"(?:^    .*\n)+", page, re.M):
        lines = [line.removeprefix("    ") for line in block.splitlines()]
        if lines[0].startswith("$ "):
            for part in "\n".join(lines).removeprefix("$ ").split("\n$ "):
                command, _, output = part.partition("\n")
                found.append((command, output))
    return found


def printed(command: str, environ: Mapping[str, str], where: Path) -> str:
    """Run a command of a page as its reader would; return what it prints."""
    done = subprocess.run(
        ["bash", "-c", command], env=environ, cwd=where, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, text=True, timeout=PATIENCE_S, check=False,
    )  # fmt: skip
    return done.stdout


def fits(said: str, output: str) -> bool:
    """Return whether a command printed what the page shows."""
    return bool(re.fullmatch(re.escape(output.strip()).replace("…", ".*"), said.strip(), re.S))
