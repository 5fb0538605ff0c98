"""How to add an extra to this installation of Iris: from a clone, a file, a repository or an index."""

from __future__ import annotations

import json
from importlib.metadata import PackageNotFoundError, distribution
from shlex import quote
from typing import Any
from urllib.parse import unquote, urlsplit

NAME = "iris-messaging"


def install_line(extra: str) -> str:
    """Return the command that adds an extra to this installation."""
    editable = "-e " if _source().get("dir_info", {}).get("editable") else ""
    return f"pip install {editable}{quote(requirement(extra))}"


def requirement(extra: str = "", *, named: bool = False) -> str:
    """Return what pip installs for Iris with this extra, as this one was installed.

    `named`: with the name of the package, as the dependencies of a project have it.
    """
    iris = f"{NAME}[{extra}]" if extra else NAME
    source = _source()
    url = source.get("url")
    if not url:
        version = _version()
        return f"{iris}=={version}" if version else iris
    if "vcs_info" in source:
        vcs = source["vcs_info"]
        url = f"{vcs['vcs']}+{url}@{vcs['commit_id']}"
    elif "dir_info" in source and not named:
        directory = unquote(urlsplit(url).path)
        return f"{directory}[{extra}]" if extra else directory
    return f"{iris} @ {url}"


def _source() -> dict[str, Any]:
    """Return where pip got this Iris, if that was no index (PEP 610); empty if it was."""
    try:
        source = json.loads(distribution(NAME).read_text("direct_url.json") or "{}")
    except (PackageNotFoundError, ValueError):
        return {}
    return source if isinstance(source, dict) else {}


def _version() -> str:
    try:
        return distribution(NAME).version
    except PackageNotFoundError:  # run from a directory that nobody installed
        return ""
