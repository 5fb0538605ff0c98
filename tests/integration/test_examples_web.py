"""The login handler of examples/web gives a page what it needs, and nothing to anybody else."""

from __future__ import annotations

import importlib.util
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from support.browsers import browser
from support.waiting import until

import iris
from iris import Keyring
from iris.crypto.keys import ClusterKey, IssuerKey, NetworkKey
from iris.crypto.scopes import Scope
from iris.tickets import Issuer
from relay.config import dev
from relay.core.issuers import Issuer as Known
from relay.daemon import Relay

PATH = Path(__file__).parents[2] / "examples" / "web" / "login.py"
ORIGIN = "https://app.example"
BASE, SERVICES, BROWSERS = (ClusterKey(bytes(range(at, at + 32))) for at in range(3))
KEYRING = Keyring({"topic:users.*": (BASE,), "delays": (SERVICES, BROWSERS)})
SIGNER, NETWORK = IssuerKey(bytes(range(4, 36))), NetworkKey(bytes(range(5, 37)))


def example() -> Any:
    spec = importlib.util.spec_from_file_location("login_example", PATH)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


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
    module = example()
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
            logins, Issuer(SIGNER, NETWORK.fingerprint), KEYRING, relay=url, origin=ORIGIN
        )
        given = {"name": "alice", "password": "secret"}
        assert (await post(app, "/login", given, origin="https://evil.example"))[0] == 403
        assert (await post(app, "/login", {**given, "password": "?"}, origin=ORIGIN))[0] == 401
        assert (await post(app, "/login", {**given, "name": "bob"}, origin=ORIGIN))[0] == 401
        assert (await post(app, "/login", [], origin=ORIGIN))[0] == 400
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
