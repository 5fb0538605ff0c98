"""The login handler of examples/web and its demo give a page what it needs, and nothing to anybody else."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from support.browsers import browser
from support.examples import load
from support.waiting import until

import iris
from iris import Keyring
from iris.crypto.keys import ClusterKey, IssuerKey, NetworkKey
from iris.crypto.scopes import Scope
from iris.errors import LocalProtocolError
from iris.tickets import Issuer
from iris.web import server
from relay.config import dev
from relay.core.issuers import Issuer as Known
from relay.daemon import Relay

ORIGIN = "https://app.example"
BASE, SERVICES, BROWSERS = (ClusterKey(bytes(range(at, at + 32))) for at in range(3))
KEYRING = Keyring({"topic:users.*": (BASE,), "delays": (SERVICES, BROWSERS)})
SIGNER, NETWORK = IssuerKey(bytes(range(4, 36))), NetworkKey(bytes(range(5, 37)))


async def post(app: Any, path: str, body: object = None, **headers: str) -> tuple[int, Any, str]:
    """Return status, document and cookie of the answer."""
    sent: list[dict[str, Any]] = []
    data = json.dumps(body).encode()

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": data, "more_body": False}

    async def send(message: dict[str, Any]) -> None:
        sent.append(message)

    named = [(name.encode(), value.encode()) for name, value in headers.items()]
    scope = {
        "type": "http", "method": "POST", "path": path, "raw_path": path.encode(), "query_string": b"", "headers": named,
        "http_version": "1.1", "scheme": "https", "server": ("app", 443), "client": ("c", 1), "root_path": "", "asgi": {"version": "3.0"},
    }  # fmt: skip
    await app(scope, receive, send)
    cookies = [value for name, value in sent[0]["headers"] if name == b"set-cookie"]
    cookie = cookies[0].decode().partition(";")[0] if cookies else ""
    return sent[0]["status"], json.loads(sent[1]["body"]), cookie


async def test_a_person_who_logs_in_gets_a_ticket_and_keys_that_a_relay_accepts(
    tmp_path: Path,
) -> None:
    module = load("login")
    directory = tmp_path / "run"
    directory.mkdir(0o700)
    wide = Scope({"subscribe": ["users.>"], "publish": ["users.>"], "request": ["delays"]})
    config = replace(
        dev(directory / "relay.sock"), listen=("ws://127.0.0.1:0",), origins=(ORIGIN,), tickets=True,
        issuers=(Known("login", (SIGNER.public_key,), wide),), network_keys=(NETWORK,),
    )  # fmt: skip
    relay = Relay(config)
    await relay.start()
    try:
        assert relay.web is not None
        url = relay.web.addresses[0]
        logins = module.Logins({"alice": (b"salt", module.hash_password("secret", b"salt"))})
        app = module.application(
            logins, Issuer(SIGNER, NETWORK.fingerprint), partial(module.users_grant, KEYRING), relay=url, origin=ORIGIN,
        )  # fmt: skip
        given = {"name": "alice", "password": "secret"}
        assert (await post(app, "/login", given, origin="https://evil.example"))[0] == 403
        assert (await post(app, "/login", {**given, "password": "?"}, origin=ORIGIN))[0] == 401
        assert (await post(app, "/login", {**given, "name": "bob"}, origin=ORIGIN))[0] == 401
        assert (await post(app, "/login", [], origin=ORIGIN))[0] == 400
        assert (await post(app, "/login", "x" * 5000, origin=ORIGIN))[0] == 413
        assert (await post(app, "/ticket", origin=ORIGIN, cookie="login=made-up"))[0] == 401
        status, answer, cookie = await post(app, "/login", given, origin=ORIGIN)
        assert status == 200
        status, renewed, _ = await post(app, "/ticket", origin=ORIGIN, cookie=cookie)
        assert status == 200
        assert renewed["ticket"] != answer["ticket"]
        keys = answer["keys"]
        page = Keyring(
            {f"topic:{name}": (ClusterKey.parse(key),) for name, key in keys["topics"].items()}
            | {name: (ClusterKey.parse(key),) for name, key in keys["clusters"].items()}
        )
        service = iris.Service("delays")
        service.on_request(lambda payload: payload)
        got: list[bytes] = []
        async with (
            iris.connect(config.socket_path, keyring=KEYRING) as here, here.serve(service),
            browser(answer["relay"], page, ticket=renewed["ticket"], origin=ORIGIN) as there,
            there.subscribe("users.alice", lambda message: got.append(message.payload)),
        ):  # fmt: skip
            # the session has shown both keys of its ticket once it has called and subscribed
            assert await there.request("delays", b"DL1", timeout=20) == b"DL1"
            await here.publish("users.alice", b"for you")
            await until(lambda: got == [b"for you"])
    finally:
        await relay.stop(drain_s=0)


async def test_each_board_of_the_demo_has_its_own_key_and_a_page_gets_that_of_its_person() -> None:
    module = load("demo")
    async with module.running(server.listen("listen", "127.0.0.1:0")) as (demo, publisher):
        app = demo.application()
        answers = {}
        for name in module.PEOPLE:
            given = {"name": name, "password": demo.passwords[name]}
            status, answers[name], _ = await post(app, "/login", given, origin=demo.origin)
            assert status == 200
            given["password"] = demo.passwords["alice" if name != "alice" else "bob"]
            assert (await post(app, "/login", given, origin=demo.origin))[0] == 401
        boards = {name: answer["keys"]["topics"] for name, answer in answers.items()}
        assert [list(each) for each in boards.values()] == [["flights.EWR"], ["flights.JFK"], ["flights.LGA"]]  # fmt: skip
        assert len({key for each in boards.values() for key in each.values()}) == 3
        # Pages call the cluster under a key that services only open.
        services, pages = demo.sandbox.keyring.for_cluster("delays")
        assert {answer["keys"]["clusters"]["delays"] for answer in answers.values()} == {pages.reveal()} != {services.reveal()}  # fmt: skip

        keys = {**boards["alice"], "flights.JFK": boards["bob"]["flights.JFK"]}
        page = Keyring(
            {f"topic:{name}": (ClusterKey.parse(key),) for name, key in keys.items()}
            | {name: (ClusterKey.parse(key),) for name, key in answers["alice"]["keys"]["clusters"].items()}
        )  # fmt: skip
        got: list[str] = []
        async with (
            browser(demo.relay, page, ticket=answers["alice"]["ticket"], origin=demo.origin) as there,
            there.subscribe("flights.EWR.>", lambda message: got.append(message.name)),
        ):  # fmt: skip
            assert (await there.request("delays", "UA", type=dict[str, int], timeout=20))["flights"] == 0  # fmt: skip
            with pytest.raises(LocalProtocolError, match="the ticket does not allow subscribe"):
                async with there.subscribe("flights.JFK.>", lambda message: None):
                    pass
            for topic in ("flights.JFK.UA", "flights.EWR.UA"):
                await publisher.publish(topic, b"row")
            await until(lambda: got == ["flights.EWR.UA"])
