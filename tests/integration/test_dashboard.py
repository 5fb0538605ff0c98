"""What `iris dashboard` answers over HTTP: to whom, and what not."""

from __future__ import annotations

import http.client
import json
import signal
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support import warm
from support.commands import command
from support.dashboards import Dashboard
from support.relays import Daemon
from support.waiting import PATIENCE_S, wait_until

from iris.dashboard.app import VERBS
from iris.web.tokens import Tokens

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

    def __init__(self, dashboard: Dashboard, token: str = "") -> None:
        host, _, port = dashboard.address.removeprefix("http://").rpartition(":")
        self.socket = socket.create_connection((host, int(port)), timeout=PATIENCE_S)
        self.socket.sendall(
            f"GET /events HTTP/1.1\r\nHost: {host}\r\nAuthorization: Bearer {token or dashboard.token}\r\n\r\n".encode()
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
    line = command("dashboard", *arguments, "--relay", str(relay.socket))
    done = warm.run(line, text=True, timeout=PATIENCE_S, env=relay.environ)
    assert done.returncode == 2
    assert said in done.stderr
    assert len(done.stderr.splitlines()) == 1


ORDER = {"action": "pause", "stream": "orders", "consumer": "invoices"}


def order(dashboard: Dashboard, body: bytes, **headers: str) -> Answer:
    return ask(
        dashboard, "/actions", "POST", body=body, **{"Content_Type": "application/json", **headers}
    )


def test_what_is_not_an_order_is_refused_with_the_reason(dashboard: Dashboard) -> None:
    wanted = json.dumps(ORDER).encode()
    assert ask(dashboard, "/actions").status == 405
    assert order(dashboard, wanted, Content_Type="text/plain").status == 415
    assert order(dashboard, wanted, Content_Type="application/x-www-form-urlencoded").status == 415
    assert order(dashboard, wanted, Origin="http://evil.example").status == 403
    assert order(dashboard, b" " * 20_000).status == 413
    for body, said in (
        (b"{", "truncated"),
        (b"\xff", "cannot be read"),
        (b"[]", "Expected `object`"),
        (b'{"action": "delete", "stream": "a", "consumer": "b"}', "Invalid enum value"),
        (json.dumps({**ORDER, "also": 1}).encode(), "unknown field"),
        (json.dumps({**ORDER, "stream": "a b"}).encode(), "a b"),
        (json.dumps({**ORDER, "uuid": "zz"}).encode(), ""),
    ):
        answer = order(dashboard, body)
        assert 400 <= answer.status < 500, body
        assert said in json.loads(answer.body)["detail"]
    assert b"Traceback" not in b"".join([order(dashboard, wanted).body, dashboard.log().encode()])


def test_an_order_for_a_stream_that_is_not_there_says_so(dashboard: Dashboard) -> None:
    """The relay has no store."""
    answer = order(dashboard, json.dumps(ORDER).encode())
    assert answer.status in (404, 503)
    assert "orders" in json.loads(answer.body)["detail"]
    assert ask(dashboard, "/dead-letters?stream=orders&consumer=invoices").status in (404, 503)
    assert ask(dashboard, "/dead-letters").status in (400, 403, 404)


def test_a_token_does_what_it_allows_and_nothing_else(tmp_path: Path, relay: Daemon) -> None:
    tokens = tmp_path / "tokens.toml"
    see, some, none = ("see" * 12, "some" * 10, "none" * 10)
    tokens.write_text(
        f'[[token]]\nname = "see"\ntoken = "{see}"\nallow.view = [">"]\n'
        f'[[token]]\nname = "some"\ntoken = "{some}"\nallow.view = [">"]\nallow.manage = ["mail.*"]\n'
        f'[[token]]\nname = "none"\ntoken = "{none}"\nallow.view = ["a"]\n'
    )
    tokens.chmod(0o600)
    with Dashboard(tmp_path / "page", relay.socket, "--tokens", str(tokens)) as dashboard:
        assert ask(dashboard, "/events", token=none).status == 403
        for token, may in ((see, ["view"]), (some, ["view", "manage"])):
            events = Events(dashboard, token)
            assert events.next("hello")["may"] == may
            events.close()
            answer = ask(
                dashboard, "/actions", "POST", token=token, body=json.dumps(ORDER).encode(), Content_Type="application/json",
            )  # fmt: skip
            assert answer.status == 403
            assert "allow.manage" in json.loads(answer.body)["detail"]
            assert ask(dashboard, "/dead-letters?stream=orders", token=token).status == 403


def test_without_a_relay_an_order_says_what_is_missing(tmp_path: Path) -> None:
    with Dashboard(tmp_path / "page", tmp_path / "nowhere.sock") as dashboard:
        answer = order(dashboard, json.dumps(ORDER).encode())
        assert answer.status == 503
        assert "nowhere.sock" in json.loads(answer.body)["detail"]


def test_the_tokens_on_the_page_of_the_documentation_are_valid(tmp_path: Path) -> None:
    page = (Path(__file__).parents[2] / "docs" / "dashboard.md").read_text("utf-8")
    file = tmp_path / "tokens.toml"
    file.write_text(page.partition("```toml\n")[2].partition("```")[0])
    file.chmod(0o600)
    tokens = Tokens.load(file, VERBS)
    caller = tokens.find("YoursIsRandomAndHasAtLeast32Letters")
    assert caller is not None
    assert caller.verbs == list(VERBS)
    assert len(tokens) == 2
