"""Everything that `make` installs is named, pinned and hashed."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FILES = sorted((ROOT / "requirements").glob("*.txt"))
ENTRY = re.compile(r"([A-Za-z0-9._-]+)==(\S+)(?: ; [^\\]+)? \\\n(?:    --hash=sha256:[0-9a-f]{64}(?: \\)?\n)+")  # fmt: skip


def plain(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def pins(*files: str) -> dict[str, str]:
    rows = [row for file in files for row in (ROOT / file).read_text().split()]
    return {plain(name): version for name, _, version in (row.partition("==") for row in rows)}


def locked(path: Path) -> dict[str, str]:
    return {plain(found[1]): found[2] for found in ENTRY.finditer(path.read_text())}


def test_there_is_a_file_for_every_environment() -> None:
    assert [path.stem for path in FILES] == ["base", "bench", "build", "demo", "deploy", "dist", "docs", "examples", "spark", "test"]  # fmt: skip


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_every_line_is_a_pinned_version_with_its_hashes(path: Path) -> None:
    """So pip refuses any other file. No registry is named."""
    assert ENTRY.sub("", path.read_text()) == ""
    allowed = pins("constraints.txt", "bench/constraints.txt")
    assert {name: allowed.get(name) for name in locked(path)} == locked(path), "run `make lock`"


def test_whatever_the_project_names_is_locked() -> None:
    document = tomllib.loads((ROOT / "pyproject.toml").read_text())
    extras = document["project"]["optional-dependencies"]
    wanted = {
        "base": document["project"]["dependencies"],
        "build": document["build-system"]["requires"],
        "demo": extras["demo"],
        "dist": (ROOT / "requirements" / "dist.in").read_text().splitlines(),
        "test": extras["test"],
        "spark": extras["spark"],
        "examples": extras["examples"],
        "docs": extras["docs"],
        "bench": (ROOT / "bench" / "requirements.txt").read_text().splitlines(),
    }
    for name, rows in wanted.items():
        names = {plain(re.split(r"[<>=;\[ ]", row)[0]) for row in rows if row and row[0] != "#"}
        assert names <= {key for path in FILES for key in locked(path)}, f"{name}: run `make lock`"


def test_the_file_for_deployments_is_whole() -> None:
    """A host installs only this file and the wheel, so nothing in it may depend on another file here."""
    document = tomllib.loads((ROOT / "pyproject.toml").read_text())
    extras = document["project"]["optional-dependencies"]
    rows = (
        document["project"]["dependencies"]
        + extras["store"]
        + extras["metrics"]
        + extras["otel"]
        + extras["web"]
        + extras["wss"]
    )
    named = {plain(re.split(r"[<>=;\[ ]", row)[0]) for row in rows}
    deployed = locked(ROOT / "requirements" / "deploy.txt")
    assert named <= set(deployed)
    base = locked(ROOT / "requirements" / "base.txt")
    assert {name: deployed.get(name) for name in base} == base


def test_nothing_is_installed_without_a_hash() -> None:
    """Except the project itself, from this folder."""
    installs = [
        row
        for file in ("Makefile", "bench/install.sh")
        for row in (ROOT / file).read_text().splitlines()
        if re.search(r"@\$\((PIP|LOCKED)\) |@\S+ -m pip install|^install -", row)
    ]
    assert len(installs) == 11
    for row in installs:
        by_hash = "$(LOCKED)" in row or "--require-hashes" in row
        assert by_hash or ("--no-deps" in row and row.endswith("-e .")), row
