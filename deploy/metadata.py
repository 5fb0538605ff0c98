"""What an index shows of the package: the README with links that work there, and where the project lives.

hatchling runs this when it builds. `IRIS_REPOSITORY` is the address of the repository:
`make dist IRIS_REPOSITORY=https://…` sets it.
Without it links to files of the repository become plain text, because they would lead nowhere.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

from hatchling.metadata.plugin.interface import MetadataHookInterface

LINK: Final = re.compile(r"\[([^\]]+)\]\(([^)\s]+)\)")


class CustomMetadataHook(MetadataHookInterface):
    """Sets the dynamic fields `readme` and `urls`."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Set both. Raises ValueError if the address of the repository does not begin with https://."""
        repository = os.environ.get("IRIS_REPOSITORY", "").rstrip("/")
        text = Path(self.root, "README.md").read_text()
        metadata["readme"] = {
            "content-type": "text/markdown",
            "text": readme(text, repository, metadata["version"]),
        }
        metadata["urls"] = urls(repository, metadata["version"])


def urls(repository: str, version: str) -> dict[str, str]:
    """Return the links of the project, none without a repository. Raises ValueError."""
    if not repository:
        return {}
    if urlsplit(repository).scheme != "https":
        raise ValueError(f"IRIS_REPOSITORY is {repository!r}, but must begin with https://")
    pages = f"{repository}/blob/v{version}"
    return {
        "Source": repository,
        "Documentation": f"{pages}/docs/README.md",
        "Changelog": f"{pages}/CHANGELOG.md",
        "Security": f"{pages}/SECURITY.md",
    }


def readme(text: str, repository: str, version: str) -> str:
    """Return the README with links into the repository at this version, or without those that need it."""

    def replaced(link: re.Match[str]) -> str:
        words, target = link.groups()
        if urlsplit(target).scheme or target.startswith("#"):
            return link[0]
        return f"[{words}]({repository}/blob/v{version}/{target})" if repository else words

    return LINK.sub(replaced, text)
