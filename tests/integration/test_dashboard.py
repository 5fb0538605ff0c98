"""What `iris dashboard` answers over HTTP: to whom, and what not."""

from __future__ import annotations

import http.client
import json
import signal
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.commands import command
from support.dashboards import Dashboard
from support.relays import Daemon
from support.waiting import PATIENCE_S, wait_until

pytestmark = pytest.mark.timeout(120)


@pytest.fixture(scope="module")
def relay(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    with Daemon(tmp_path_factory.mktemp("relay")) as daemon:
        yield daemon


@pytest.fixture(scope="module")
def dashboard(tmp_path_factory: pytest.TempPathFactory, relay: Daemon) -> Iterator[Dashboard]:
    with Dashboard(tmp_path_factory.mktemp("page"), relay.socket) as dashboard:
        yield dashboard


class Answer:
    """The status, headers and body of an answer."""

    def __init__(self, answer: http.client.HTTPResponse, body: bytes) -> None:
        self.status = answer.status
        self.headers = answer.headers
        self.body = body


def ask(
    dashboard: Dashboard, path: str, method: str = "GET", *, token: str | None = "", body: bytes | None = None, **headers: str,
) -> Answer:  # fmt: skip
    """Send a request and return its answer. `token`: None for none; "" for that of the dashboard."""
    connection = http.client.HTTPConnection(dashboard.address.removeprefix("http://"), timeout=PATIENCE_S)  # fmt: skip
    sent = {name.replace("_", "-"): value for name, value in headers.items()}
    if token is not None:
        sent["Authorization"] = f"Bearer {token or dashboard.token}"
    try:
        connection.request(method, path, body, sent)
        answer = connection.getresponse()
        streamed = answer.status == 200 and path == "/events"
        return Answer(answer, b"" if streamed else answer.read())
    finally:
        connection.close()


class Events:
    """A stream of events, read by hand."""

    def __init__(self, dashboard: Dashboard) -> None:
        host, _, port = dashboard.address.removeprefix("http://").rpartition(":")
        self.socket = socket.create_connection((host, int(port)), timeout=PATIENCE_S)
        self.socket.sendall(
            f"GET /events HTTP/1.1\r\nHost: {host}\r\nAuthorization: Bearer {dashboard.token}\r\n\r\n".encode()
        )
        self._file = self.socket.makefile("rb")

    def next(self, name: str) -> Any:
        """Return the data of the next event of this name."""
        for line in self._file:
            if line == f"event: {name}\n".encode():
                return json.loads(next(self._file).removeprefix(b"data: "))
        raise AssertionError("the stream ended")

    def rest(self) -> bytes:
        return self._file.read()

    def close(self) -> None:
        self._file.close()
        self.socket.close()


def test_nothing_of_the_network_is_told_without_the_token(dashboard: Dashboard) -> None:
    for token in (
        None,
        "wrong",
        "a wrong one",
        "é",
        dashboard.token[:-1],
        dashboard.token + "x",
        "x" * 5000,
    ):
        answer = ask(dashboard, "/events", token=token)
        assert answer.status in (400, 401), token
    assert ask(dashboard, f"/events?token={dashboard.token}", token=None).status == 401
    assert ask(dashboard, "/events").status == 200


def test_wrong_tokens_are_limited_and_the_right_one_still_passes(
    tmp_path: Path, relay: Daemon
) -> None:
    with Dashboard(tmp_path / "page", relay.socket) as dashboard:
        statuses = [ask(dashboard, "/events", token=f"wrong-{n}").status for n in range(15)]
        assert statuses[:5] == [401] * 5
        assert statuses[-1] == 429
        assert int(ask(dashboard, "/events", token="wrong").headers["Retry-After"]) > 0
        assert ask(dashboard, "/events").status == 200


def test_only_the_files_of_the_page_are_served_without_a_token(dashboard: Dashboard) -> None:
    for path in ("/", "/dashboard.css", "/dashboard.js", "/icon.svg"):
        answer = ask(dashboard, path, token=None)
        assert answer.status == 200
        policy = answer.headers["Content-Security-Policy"]
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy
        assert "http" not in policy
        assert answer.headers["X-Content-Type-Options"] == "nosniff"
        assert answer.headers["Cache-Control"] == "no-store"
        assert "Server" not in answer.headers
    for path in ("/x", "/../serving.py", "/static/index.html", "//", "/events/", "/index.html"):
        assert ask(dashboard, path, token=None).status == 401, path
        assert ask(dashboard, path).status == 404, path
    assert ask(dashboard, "/", "POST", token=None).status == 405


def test_another_host_or_origin_is_refused(dashboard: Dashboard) -> None:
    assert ask(dashboard, "/", Host="evil.example").status == 421
    assert ask(dashboard, "/events", Host="evil.example").status == 421
    assert ask(dashboard, "/events", Origin="http://evil.example").status == 403
    assert ask(dashboard, "/events", Origin="null").status == 403
    assert ask(dashboard, "/events", Origin=dashboard.address).status == 200


def test_the_page_is_made_without_markup_from_data_or_files_of_others(dashboard: Dashboard) -> None:
    script = ask(dashboard, "/dashboard.js", token=None).body.decode()
    for word in (
        "innerHTML",
        "outerHTML",
        "insertAdjacent",
        "document.write",
        "eval(",
        "new Function",
    ):
        assert word not in script
    page = ask(dashboard, "/", token=None).body.decode()
    for text in (page, script, ask(dashboard, "/dashboard.css", token=None).body.decode()):
        assert [
            line for line in text.splitlines() if "://" in line and "www.w3.org" not in line
        ] == []
    assert "<style" not in page
    assert "style=" not in page
    assert "onclick" not in page


def test_events_begin_with_what_is_known_and_go_on(dashboard: Dashboard, relay: Daemon) -> None:
    events = Events(dashboard)
    hello = events.next("hello")
    assert hello["read_only"] is False
    assert hello["user"] == "page"
    first = events.next("network")
    assert first["relays"][0]["address"] == str(relay.socket)
    later = events.next("network")
    assert later["serial"] > first["serial"]
    events.close()


def test_pages_are_limited_and_a_closed_one_makes_room(tmp_path: Path, relay: Daemon) -> None:
    with Dashboard(tmp_path / "page", relay.socket) as dashboard:
        pages = [Events(dashboard) for _ in range(64)]
        for page in pages:
            page.next("hello")
        refused = ask(dashboard, "/events")
        assert refused.status == 503
        assert int(refused.headers["Retry-After"]) > 0
        pages.pop().close()
        wait_until(lambda: ask(dashboard, "/events").status == 200)
        for page in pages:
            page.close()


def test_a_dashboard_that_stops_ends_its_pages_and_exits_with_0(
    tmp_path: Path, relay: Daemon
) -> None:
    with Dashboard(tmp_path / "page", relay.socket) as dashboard:
        events = Events(dashboard)
        events.next("hello")
        dashboard.process.send_signal(signal.SIGINT)
        events.rest()
        assert dashboard.process.wait(PATIENCE_S) == 0
        events.close()


def test_read_only_has_nothing_to_press(tmp_path: Path, relay: Daemon) -> None:
    with Dashboard(tmp_path / "page", relay.socket, "--read-only") as dashboard:
        events = Events(dashboard)
        assert events.next("hello")["read_only"] is True
        events.close()
        order = b'{"action": "pause", "stream": "orders", "consumer": "invoices"}'
        assert ask(dashboard, "/actions", "POST", body=order, Content_Type="application/json").status == 404  # fmt: skip
        assert ask(dashboard, "/dead-letters?stream=orders&consumer=invoices").status == 404


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--listen", "0.0.0.0:0"], "not a loopback address"),
        (["--listen", "8080"], "not ADDRESS:PORT"),
        (["--listen", "127.0.0.1:0", "--tokens", "/nonexistent/tokens.toml"], "/nonexistent/tokens.toml"),
    ],
)  # fmt: skip
def test_a_mistake_is_one_line_and_the_exit_code_2(
    tmp_path: Path, relay: Daemon, arguments: list[str], said: str
) -> None:
    done = subprocess.run(
        command("dashboard", *arguments, "--relay", str(relay.socket)), capture_output=True, text=True, timeout=PATIENCE_S,
        check=False, env=relay.environ,
    )  # fmt: skip
    assert done.returncode == 2
    assert said in done.stderr
    assert len(done.stderr.splitlines()) == 1
