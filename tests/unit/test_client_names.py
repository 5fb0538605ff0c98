"""What a program's completion shows of a client: verbs, and what the documentation names."""

from __future__ import annotations

import inspect
from pathlib import Path

import iris

VERBS = {
    "audience", "broadcast", "close", "describe", "flush", "members", "offer", "offer_broadcast", "open", "open_tunnel", "ping", "publish", "push",
    "reload_keys", "request", "request_many", "serve", "stats", "status", "subscribe", "survey", "tunnel", "wait_for_members", "wait_for_subscribers",
    "watch_losses", "watch_members",
}  # fmt: skip
ATTRIBUTES = {
    "config", "counters", "keyring", "losses", "message_limit", "on_loss", "received_messages", "sent_messages", "streams",
}  # fmt: skip


def test_a_client_shows_its_verbs_and_documented_attributes_alone() -> None:
    client = iris.connect()
    shown = {name for name in dir(client) if not name.startswith("_")}
    assert shown == VERBS | ATTRIBUTES


def test_every_public_name_of_a_client_says_what_it_is() -> None:
    for name in VERBS | ATTRIBUTES - {"config", "counters", "losses"}:  # those are plain attributes
        assert inspect.getdoc(inspect.getattr_static(iris.Client, name)), name


def test_what_a_client_is_made_of_does_not_know_the_client() -> None:
    folder = Path(iris.__file__).parent
    above = {"__init__.py", "blocking.py", "public.py", "testing.py"}
    below = [path for path in folder.glob("*.py") if path.name not in above]
    for path in [*below, *(folder / "streams").rglob("*.py"), *(folder / "core").rglob("*.py")]:
        imports = [line for line in path.read_text().splitlines() if "import" in line.split()]
        assert not [line for line in imports if "iris.client" in line], path
