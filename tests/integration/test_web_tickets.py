"""Tickets of sessions over WebSocket: who is let in, what each may do, and until when."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jwt
import pytest
from integration.stores import whole
from integration.web_kit import (
    HOME,
    KEY,
    KEYS,
    LOGIN,
    NETWORK,
    OTHER,
    SIGNER,
    STRANGER,
    WIDE,
    alice,
    near,
    service,
    ticketed,
    tickets,
    url,
)
from integration.web_kit import relay as relay
from support.browsers import Page, browser
from support.waiting import eventually, until

import iris
from iris import Keyring
from iris.crypto.keys import public_id
from iris.errors import ConfigError, LocalProtocolError, RelayError
from iris.tickets import Issuer
from iris.wire import frames
from relay import issuer_settings
from relay.daemon import Relay


def forged(**changes: Any) -> str:
    """Return a ticket with other claims, which no issuer makes; `key`, `headers` and `algorithm` sign it."""
    now_s = int(time.time())
    key = changes.pop("key", SIGNER)
    headers = changes.pop("headers", {"kid": public_id(key.public_key).hex()})
    claims: dict[str, Any] = {
        "aud": NETWORK.fingerprint.hex(), "sub": "alice", "jti": "1", "iat": now_s, "exp": now_s + 600, "allow": WIDE, **changes
    }  # fmt: skip
    claims = {name: value for name, value in claims.items() if value is not None}
    return jwt.encode(claims, key.signer, algorithm="EdDSA", headers=headers)


def tampered() -> str:
    head, body, signature = alice().split(".")
    return ".".join((head, body, signature[:-8] + "AAAAAAA" + signature[-1]))


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: "", "no ticket"),
        (lambda: "not a ticket", "ticket malformed"),
        (lambda: "a.b.c", "ticket malformed"),
        (lambda: tampered(), "ticket forged"),
        (lambda: forged(key=STRANGER), "ticket of an unknown issuer"),
        (lambda: forged(key=STRANGER, headers={"kid": public_id(SIGNER.public_key).hex()}), "ticket forged"),
        (lambda: forged(aud="00" * 16), "ticket of another network"),
        (lambda: forged(aud=[NETWORK.fingerprint.hex()]), "ticket malformed"),
        (lambda: forged(iat=1, exp=int(time.time()) - 1), "ticket expired"),
        (lambda: forged(iat=int(time.time()) + 3000, exp=int(time.time()) + 3600), "ticket not valid yet"),
        (lambda: forged(exp=int(time.time()) + 4000), "ticket valid for too long"),
        (lambda: forged(exp=None), "ticket malformed"),
        (lambda: forged(exp="soon"), "ticket malformed"),
        (lambda: forged(exp=time.time() + 60.5), "ticket malformed"),
        (lambda: forged(exp=-1), "ticket malformed"),
        (lambda: forged(exp=1 << 53), "ticket malformed"),
        (lambda: forged(exp=(1 << 53) - 1), "ticket valid for too long"),
        (lambda: forged(iat=True), "ticket malformed"),
        (lambda: forged(jti=None), "ticket malformed"),
        (lambda: forged(sub=7), "ticket malformed"),
        (lambda: forged(allow={"fly": ["x"]}), "ticket malformed"),
        (lambda: forged(allow=[]), "ticket malformed"),
        (lambda: forged(keys=["zz"]), "ticket malformed"),
        (lambda: forged(headers={"kid": public_id(SIGNER.public_key).hex(), "jku": "https://evil.example"}), "ticket malformed"),
        (lambda: forged(origin="https://other.example"), "ticket of another origin"),
        (lambda: jwt.encode({"aud": "x"}, "secret of thirty-two bytes or more", algorithm="HS256"), "ticket malformed"),
        (lambda: jwt.encode({"aud": "x"}, None, algorithm="none"), "ticket malformed"),
    ],
)  # fmt: skip
async def test_a_ticket_that_is_not_valid_admits_nobody(
    relay: Relay, make: Callable[[], str], reason: str
) -> None:
    text = make()
    async with Page(url(relay), origin=HOME) as page:
        fields = {"ticket": text} if text else {}
        await page.say(frames.Hello(1, 8, mono_us=1, **fields))
        assert (await page.receive(frames.Error)).detail.startswith(reason)
        code, why = await page.closed()
        assert code == 4003
        assert why.startswith(reason)
    assert relay.web is not None
    assert relay.web.refusals == {reason: 1}


async def test_a_ticket_for_one_origin_is_not_accepted_from_another(relay: Relay) -> None:
    text = alice(origin=HOME)
    async with Page(url(relay), origin=HOME) as page:
        await page.greet(ticket=text)
    for origin in ("https://evil.example", None):
        async with Page(url(relay), origin=origin) as page:
            await page.say(frames.Hello(1, 8, mono_us=1, ticket=text))
            assert (await page.closed())[0] == 4003


async def test_a_session_does_what_ticket_and_issuer_both_allow_and_nothing_else(
    relay: Relay,
) -> None:
    allow = {**WIDE, "request": ["delays", "secret"], "subscribe": ["users.alice"]}
    got: list[bytes] = []
    async with (
        near(relay) as here, browser(url(relay), KEYS, ticket=alice(allow=allow)) as there,
        here.serve(service("delays")), here.serve(service("secret")), here.serve(service("other")),
    ):  # fmt: skip
        assert await there.request("delays", b"DL1", timeout=20) == b"DL1"
        for name in ("secret", "other"):  # of the issuer alone, and of the ticket alone
            with pytest.raises(RelayError, match=f"the ticket does not allow request for '{name}'"):
                await there.request(name, b"?", timeout=20)
        async with there.serve(service("browsers.1")):
            assert await here.request("browsers.1", b"up", timeout=20) == b"up"
        with pytest.raises(LocalProtocolError, match="does not allow serve for 'delays'"):
            async with there.serve(service("delays")):
                pass
        async with there.subscribe("users.alice", lambda message: got.append(message.payload)):
            await here.publish("users.alice", b"hello")
            await until(lambda: got == [b"hello"])
        for wide in ("users.*", "users.bob", ">"):
            with pytest.raises(LocalProtocolError, match="does not allow subscribe"):
                async with there.subscribe(wide, lambda message: None):
                    pass
        lost: list[iris.Loss] = []
        async with here.subscribe("news", lambda message: lost.append(message)):  # type: ignore[arg-type]  # nothing comes
            await there.publish("news", b"forged")
            await there.publish("chat.a", b"allowed")
            await eventually(lambda: tickets(relay)["denied"].get("publish") == 1)
        assert not lost
        assert len(await there.members("delays")) == 1
        with pytest.raises(Exception, match="does not allow members"):
            await there.members("secret")
    assert relay.router.accounts.report(0)["dropped"]["alias refused"] == 1


async def test_a_ticket_that_names_keys_is_worth_nothing_without_them(relay: Relay) -> None:
    text = alice(keys=[KEY])
    async with near(relay) as here, here.serve(service("delays")), here.serve(service("other")):
        async with browser(url(relay), KEYS, ticket=text) as there:
            assert await there.request("delays", b"DL1", timeout=20) == b"DL1"
            with pytest.raises(RelayError, match="the ticket does not name key"):
                await there.request("other", b"?", timeout=20)
        stolen = Keyring({"other": (OTHER,)})
        async with browser(url(relay), stolen, ticket=text) as there:
            with pytest.raises(RelayError, match="the ticket does not name key"):
                await there.request("other", b"?", timeout=20)
        two = alice(keys=[KEY, OTHER])
        async with browser(url(relay), stolen, ticket=two) as there:
            with pytest.raises(RelayError, match="requires a proof of key"):
                await there.request("other", b"?", timeout=20)


async def test_a_session_ends_when_its_ticket_expires_unless_it_was_renewed(relay: Relay) -> None:
    past = time.time() - 598.5
    async with Page(url(relay)) as page, Page(url(relay)) as renewed:
        await page.greet(ticket=alice(now_s=past))
        await renewed.greet(ticket=alice(now_s=past))
        for text, error in (
            (alice(now_s=past - 10), "ticket expired"),
            (LOGIN.issue("bob", allow=WIDE, life_s=60), "another issuer or for another subject"),
            (alice(), ""),
        ):
            await renewed.say(frames.Ticket(5, text))
            ack = await renewed.receive(frames.Ack)
            assert error in ack.error
            assert bool(error) == bool(ack.error)
        assert await page.closed() == (4004, "the ticket expired")
        await renewed.say(frames.Ping(9))
        assert (await renewed.receive(frames.Pong)).id == 9
    assert tickets(relay)["ended"] == {"the ticket expired": 1}


async def test_a_renewed_ticket_narrows_what_is_sent_and_cannot_take_what_the_session_has(
    relay: Relay,
) -> None:
    async with (
        near(relay) as here, browser(url(relay), KEYS, ticket=alice()) as there, here.serve(service("delays")),
        there.subscribe("users.alice", lambda message: None),
    ):  # fmt: skip
        assert await there.request("delays", b"1", timeout=20) == b"1"
        (port,) = [port for port in relay.hub.ports if port.session.web]
        admission = relay.router.admission
        assert admission is not None
        wall_us = time.time_ns() // 1000
        error = admission.renew(port.session, alice(allow={"request": ["delays"]}), wall_us)
        assert "does not allow subscribe for 'users.alice'" in error
        assert not admission.renew(port.session, alice(allow={"subscribe": ["users.*"]}), wall_us)
        with pytest.raises(RelayError, match="does not allow request"):
            await there.request("delays", b"2", timeout=20)


async def test_a_subject_has_only_so_many_sessions_and_an_issuer_is_a_user(relay: Relay) -> None:
    async with Page(url(relay)) as one, Page(url(relay)) as two, Page(url(relay)) as three:
        for page in (one, two, three):
            await page.greet(ticket=alice())
        assert relay.hub.users.held["ticket issuer login"] == 3
        async with Page(url(relay)) as four:
            await four.say(frames.Hello(1, 8, mono_us=1, ticket=alice()))
            assert (await four.closed())[1].startswith("too many sessions of a subject")
    await until(lambda: not relay.hub.ports)
    assert tickets(relay)["subjects"] == 0
    assert not relay.hub.users.held


async def test_a_ticket_in_the_address_is_not_read(relay: Relay) -> None:
    async with Page(f"{url(relay)}/?ticket={alice()}") as page:
        await page.say(frames.Hello(1, 8, mono_us=1))
        assert (await page.closed())[0] == 4003


async def test_a_stream_is_read_by_its_name_whatever_the_call_goes_to(tmp_path: Path) -> None:
    async with ticketed(tmp_path, WIDE) as (cluster, client, listener):
        for name in ("departures", "secret"):
            await client.streams.create(name, partitions=2)
            for number in range(30):  # so many that both partitions get some
                await client.streams.append(name, bytes([number]), key=bytes([number]))
        text = alice()
        async with browser(listener.addresses[0], cluster.keyring, ticket=text) as there:
            got = await whole(there, "departures")
            assert sorted(message.payload for message in got) == [
                bytes([number]) for number in range(30)
            ]
            assert {message.partition for message in got} == {0, 1}
            with pytest.raises(iris.NoStream, match="does not allow read or consume or append"):
                await whole(there, "secret")
            with pytest.raises(iris.StreamUnavailable, match="does not allow append") as refused:
                await there.streams.append("departures", b"5", timeout=3600)
            assert refused.value.may_have_run  # the relay alone says that it is not stored


def test_the_settings_of_an_issuer_are_checked(tmp_path: Path) -> None:
    key = LOGIN.public_key
    good = {"public_keys": [key], "allow": {"read": ["departures"]}, "max_life_s": 60}
    (made,) = issuer_settings.parse_issuers({"login": good}) or ()
    assert made.max_life_s == 60
    assert issuer_settings.parse_issuers(json.dumps({"login": good})) == (made,)
    assert issuer_settings.parse_issuers("nonsense") is None
    for changes, text in (
        ({"public_keys": []}, "list of 1 to 8 keys"),
        ({"public_keys": ["short"]}, "43 characters"),
        ({"allow": {}}, "say what is allowed"),
        ({"allow": {"reed": ["x"]}}, "did you mean 'read'"),
        ({"allow": {"read": "x"}}, "write a list of names"),
        ({"max_life_s": 0}, "from 1 to"),
        ({"lifetime": 5}, "not a setting of an issuer"),
    ):
        with pytest.raises(ConfigError, match=text):
            issuer_settings.parse_issuers({"login": {**good, **changes}})
    with pytest.raises(ConfigError, match="have the same key"):
        issuer_settings.parse_issuers({"a": good, "b": good})
    with pytest.raises(ConfigError, match="cannot read"):
        issuer_settings.load_revoked(tmp_path / "missing")


def test_an_issuer_is_made_once_and_loaded_again(tmp_path: Path) -> None:
    path = tmp_path / "issuer.toml"
    made = Issuer.create(path, NETWORK.fingerprint)
    assert Issuer.load(path).public_key == made.public_key
    assert path.stat().st_mode & 0o777 == 0o600
    with pytest.raises(iris.KeyringError, match="already exists"):
        Issuer.create(path, NETWORK.fingerprint)
    with pytest.raises(ConfigError, match="there is no such verb"):
        made.issue("alice", allow={"fly": ["x"]}, life_s=60)
    with pytest.raises(ConfigError, match="exp must be after iat"):
        made.issue("alice", allow=WIDE, life_s=0)
    path.write_text("[issuer]\n")
    with pytest.raises(iris.KeyringError, match="not the file of an issuer"):
        Issuer.load(path)
