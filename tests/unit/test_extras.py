"""The command that adds an extra fits the way in which Iris was installed."""

from __future__ import annotations

import json
from typing import Any

import pytest

from iris import extras


class Installed:
    version = "0.1.0"

    def __init__(self, source: Any) -> None:
        self._source = source

    def read_text(self, name: str) -> str | None:
        assert name == "direct_url.json"
        return None if self._source is None else json.dumps(self._source)


CLONE = {"url": "file:///src/my%20iris", "dir_info": {"editable": True}}
COPY = {"url": "file:///src/iris", "dir_info": {}}
WHEEL = {
    "url": "file:///w/iris_messaging-0.1.0-py3-none-any.whl",
    "archive_info": {"hash": "sha256=00"},
}
GIT = {"url": "https://git.example/iris.git", "vcs_info": {"vcs": "git", "commit_id": "abc123"}}


@pytest.mark.parametrize(
    ("source", "line", "pinned"),
    [
        (CLONE, "pip install -e '/src/my iris[store]'", "iris-messaging[store] @ file:///src/my%20iris"),
        (COPY, "pip install '/src/iris[store]'", "iris-messaging[store] @ file:///src/iris"),
        (WHEEL, "pip install 'iris-messaging[store] @ file:///w/iris_messaging-0.1.0-py3-none-any.whl'", "iris-messaging[store] @ file:///w/iris_messaging-0.1.0-py3-none-any.whl"),
        (GIT, "pip install 'iris-messaging[store] @ git+https://git.example/iris.git@abc123'", "iris-messaging[store] @ git+https://git.example/iris.git@abc123"),
        (None, "pip install 'iris-messaging[store]==0.1.0'", "iris-messaging[store]==0.1.0"),
    ],
)  # fmt: skip
def test_an_extra_comes_from_where_iris_came(
    source: Any, line: str, pinned: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(extras, "distribution", lambda name: Installed(source))
    assert extras.install_line("store") == line
    assert extras.requirement("store", named=True) == pinned


def test_without_a_distribution_the_name_alone_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> Any:
        raise extras.PackageNotFoundError(name)

    monkeypatch.setattr(extras, "distribution", missing)
    assert extras.install_line("store") == "pip install 'iris-messaging[store]'"
    assert extras.requirement() == "iris-messaging"
