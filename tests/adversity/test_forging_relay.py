"""Messages that a relay forges, swaps, repeats or seals under a retired key are never delivered."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from adversity.kit import OTHER_KEY, data_frame
from adversity.liar import SENDER, Liar, Peer, acknowledging, hop_of
from support.relays import KEY
from support.waiting import eventually

import iris
from iris.core.tunnel import prologue
from iris.crypto.keys import ClusterKey
from iris.crypto.noise import Handshake
from iris.wire import frames
from iris.wire.codec import RELAY_HOP, encode_control
from iris.wire.frames import Control
from iris.wire.kinds import FLAG_REFUSED, Cause, Kind, Refusal

pytestmark = [pytest.mark.timeout(30), pytest.mark.usefixtures("nothing_hangs")]


def answering(*answers: Any) -> Any:
    """Return a script that answers each request with the result of the next function in `answers`."""
    turn = iter(answers)

    def script(peer: Peer, body: Control | bytes) -> None:
        if isinstance(body, bytes) and body[4] == Kind.REQUEST:
            peer.send(peer.declare(3, Kind.REPLY, "db"))
            peer.send(next(turn)(peer, body))
        else:
            acknowledging(peer, body)

    return script


def reply(peer: Peer, request: bytes, **changes: Any) -> bytes:
    """Return the true reply to a request."""
    said = {"alias": 3, "hop": hop_of(request), "suffix": peer.suffix(request), **changes}
    return peer.sealed(Kind.REPLY, "db", b"true", **said)


async def test_a_forged_or_swapped_reply_is_never_delivered(tmp_path: Path) -> None:
    first: list[bytes] = []

    def remember(peer: Peer, request: bytes) -> bytes:
        first.append(peer.suffix(request))
        return reply(peer, request)

    script = answering(
        remember,
        lambda peer, request: reply(peer, request, true=False),
        lambda peer, request: reply(peer, request, suffix=first[0]),
        lambda peer, request: reply(peer, request, suffix=b""),
        reply,
    )
    async with Liar(tmp_path, script) as liar, liar.client() as client:
        assert await client.request("db", b"", timeout=5) == b"true"
        for _ in range(3):
            with pytest.raises(iris.ConnectionLost, match="cannot be read"):
                await client.request("db", b"", timeout=5)
        assert await client.request("db", b"", timeout=5) == b"true"
        assert client.counters == {} or "unreadable" in client.counters
        assert len(liar.peers) == 1


async def test_a_reply_of_another_cluster_or_to_nobody_is_never_delivered(tmp_path: Path) -> None:
    def elsewhere(peer: Peer, request: bytes) -> bytes:
        suffix = peer.suffix(request)
        said = peer.sealed(
            Kind.REPLY, "other", b"false", alias=4, hop=hop_of(request), suffix=suffix
        )
        return encode_control(peer.declare(4, Kind.REPLY, "other")) + said

    def to_nobody(peer: Peer, request: bytes) -> bytes:
        stray = peer.sealed(Kind.REPLY, "db", b"false", alias=3, hop=999, suffix=b"")
        return stray + reply(peer, request) + reply(peer, request)

    async with (
        Liar(tmp_path, answering(elsewhere, to_nobody, reply)) as liar,
        liar.client() as client,
    ):
        with pytest.raises(iris.ConnectionLost, match="cannot be read"):
            await client.request("db", b"", timeout=5)
        assert await client.request("db", b"", timeout=5) == b"true"
        assert await client.request("db", b"", timeout=5) == b"true"


async def test_a_forged_failure_is_an_error_and_says_so(tmp_path: Path) -> None:
    """FAIL is not authenticated: a relay may deny service, and every cause, known or not, is a documented error."""
    causes = iter([*Cause, 99])

    def script(peer: Peer, body: Control | bytes) -> None:
        if isinstance(body, bytes):
            peer.send(frames.Fail(hop_of(body), next(causes), "because"))
        else:
            acknowledging(peer, body)

    async with Liar(tmp_path, script) as liar, liar.client() as client:
        for _ in range(len(Cause) + 1):
            with pytest.raises(iris.RequestError, match="because"):
                await client.request("db", b"", timeout=5)
        assert len(liar.peers) == 1


def failing(cause: Cause, detail: str) -> Any:
    """Return a script that delivers every message and reports to its sender that it has not run."""

    def script(peer: Peer, body: Control | bytes) -> None:
        if isinstance(body, bytes):
            peer.send(frames.Fail(hop_of(body), cause, detail, False))
        else:
            acknowledging(peer, body)

    return script


@pytest.mark.parametrize("cause", [*Cause, 99])
@pytest.mark.parametrize("detail", ["stale", "because"])
async def test_nothing_that_a_relay_says_seals_a_request_twice_that_may_run_once(
    cause: Cause, detail: str, tmp_path: Path
) -> None:
    """ "Pay 100" is sent once, whatever the relay reports."""
    async with Liar(tmp_path, failing(cause, detail)) as liar, liar.client() as client:
        with pytest.raises(iris.RequestError, match=detail) as failed:
            await client.request("db", b"pay 100", timeout=5)
        assert not isinstance(failed.value, iris.RemoteError)
        await client.push("db", b"pay 100")
        survey = client.survey("db", b"pay 100", timeout=5)
        with pytest.raises(iris.RequestError, match=detail):
            assert [answer async for answer in survey] == []
        await client.flush()
        sent = [liar.last.count(kind) for kind in (Kind.REQUEST, Kind.PUSH, Kind.SURVEY)]
        assert sent == [1, 1, 1]
        assert not isinstance(client.losses[0].error, iris.RemoteError)
        if (cause, detail) == (Cause.REFUSED, "stale"):
            assert failed.value.may_have_run
            assert client.losses[0].error is not None
            assert client.losses[0].error.may_have_run


async def test_a_relay_that_always_says_stale_is_not_asked_for_ever(tmp_path: Path) -> None:
    async with Liar(tmp_path, failing(Cause.REFUSED, "stale")) as liar, liar.client() as client:
        with pytest.raises(iris.RelayError, match="stale") as failed:
            await client.request("db", b"", timeout=5, idempotent=True)
        assert failed.value.may_have_run
        assert liar.last.count(Kind.REQUEST) == 3


async def test_a_relay_that_hangs_up_after_each_message_gets_each_once(tmp_path: Path) -> None:
    """A message in transit when the connection ends is sent again only if it is idempotent."""

    def script(peer: Peer, body: Control | bytes) -> None:
        if isinstance(body, bytes):
            peer.hang_up()
        else:
            acknowledging(peer, body)

    async with Liar(tmp_path, script) as liar, liar.client() as client:
        calls: list[Any] = [
            lambda: client.request("db", b"pay 100", timeout=5),
            lambda: client.open_tunnel("db", timeout=5),
        ]
        for call in calls:
            with pytest.raises(iris.ConnectionLost):
                await call()
            await client.flush()
        await client.push("db", b"pay 100")
        await client.publish("a.b", b"pay 100")
        await client.broadcast("db", b"pay 100")
        await eventually(lambda: len(liar.peers) >= 4)
        await client.flush()
        kinds = (Kind.REQUEST, Kind.PUSH, Kind.BROADCAST, Kind.PUBLISH, Kind.TUNNEL_OPEN)
        sent = [sum(peer.count(kind) for peer in liar.peers) for kind in kinds]
        assert max(sent) == 1


async def test_a_relays_text_is_never_reported_as_a_members(tmp_path: Path) -> None:
    """A key holder sealed the text of a RemoteError; a relay's text has another class."""
    script = failing(Cause.REFUSED, "ValueError: the account is empty")
    async with Liar(tmp_path, script) as liar, liar.client() as client:
        for idempotent in (False, True):
            with pytest.raises(iris.RelayError, match="account is empty") as failed:
                await client.request("db", b"", timeout=5, idempotent=idempotent)
            assert not isinstance(failed.value, iris.RemoteError)
        with pytest.raises(iris.RelayError):
            await client.open_tunnel("db", timeout=5)
        forged: list[str] = []
        client.on_loss = lambda lost: forged.append(type(lost.error).__name__)
        await client.push("db", b"")
        await client.flush()
        assert forged == ["RelayError"]


async def test_forged_and_repeated_publications_are_never_delivered(tmp_path: Path) -> None:
    received: list[bytes] = []
    async with (
        Liar(tmp_path, acknowledging) as liar,
        liar.client() as client,
        client.subscribe("a.>", lambda message: received.append(message.payload)),
    ):
        peer = liar.last
        true = peer.sealed(Kind.PUBLISH, "a.b", b"one", first=0)
        peer.send(peer.declare(0, Kind.PUBLISH, "a.b"), true, true)
        peer.send(peer.sealed(Kind.PUBLISH, "a.b", b"forged", first=1, true=False))
        peer.send(peer.sealed(Kind.PUBLISH, "a.c", b"spliced", first=1))
        broadcast = peer.sealed(Kind.BROADCAST, "a.b", b"of another kind", first=1)
        peer.send(broadcast[:4] + bytes((Kind.PUBLISH,)) + broadcast[5:])
        peer.send(peer.sealed(Kind.PUBLISH, "a.b", b"two", first=1), true)
        await eventually(lambda: len(received) == 2)
        await client.flush()
        assert received == [b"one", b"two"]
        # All three replace one message: that one is reported as lost once, and the others are counted.
        assert sum(lost.count or 0 for lost in client.losses) == 1
        session = client._attachment.session  # type: ignore[union-attr]
        assert session.dropped["late or repeated"] >= 3


async def test_who_holds_one_key_does_not_speak_for_topics_of_another(tmp_path: Path) -> None:
    """A filter for everything is registered under both keys; a topic belongs to its own."""
    keyring = iris.Keyring({"default": (OTHER_KEY,), "topic:orders": (KEY,)})
    received: list[tuple[str, bytes]] = []
    async with (
        Liar(tmp_path, acknowledging) as liar,
        iris.connect(liar.path, keyring=keyring) as client,
        client.subscribe(">", lambda message: received.append((message.name, message.payload))),
    ):
        peer = liar.last
        for alias, (topic, key) in enumerate(
            [("orders.eu", OTHER_KEY), ("orders.eu", KEY), ("news", KEY), ("news", OTHER_KEY)]
        ):
            peer.send(peer.declare(alias, Kind.PUBLISH, topic, key=key))
            said = b"true" if (topic == "news") == (key is OTHER_KEY) else b"false"
            peer.send(peer.sealed(Kind.PUBLISH, topic, said, alias=alias, key=key))
        await client.flush()
        assert received == [("orders.eu", b"true"), ("news", b"true")]


def noting(ran: list[bytes]) -> iris.Service:
    """Return a service of the cluster "db" that records its messages in `ran`."""
    service = iris.Service("db")
    for register in (service.on_request, service.on_push, service.on_survey, service.on_broadcast):
        register(lambda payload: ran.append(payload))
    return service


@pytest.mark.parametrize("kind", [Kind.REQUEST, Kind.PUSH, Kind.SURVEY, Kind.BROADCAST])
async def test_a_message_reaches_only_the_service_that_it_is_addressed_to(
    kind: Kind, tmp_path: Path
) -> None:
    """The relay names the member; the seal names the cluster and the key. They must agree."""
    ran: list[bytes] = []
    service = noting(ran)
    keyring = iris.Keyring({"default": (OTHER_KEY,), "db": (KEY,)})

    async with (
        Liar(tmp_path, acknowledging) as liar,
        iris.connect(liar.path, keyring=keyring) as client,
        client.serve(service),
    ):
        peer = liar.last
        addresses: list[tuple[str, ClusterKey]] = [("payroll", OTHER_KEY), ("db", OTHER_KEY), ("payroll", KEY), ("db", KEY)]  # fmt: skip
        for alias, (name, key) in enumerate(addresses):
            said = b"true" if (name, key) == ("db", KEY) else b"false"
            frame = peer.sealed(kind, name, said, alias=alias, hop=RELAY_HOP + alias, key=key)
            peer.send(peer.declare(alias, kind, name, key=key, member=7), frame)
        await client.flush()
        assert ran == [b"true"]
        await client.flush()
        refused = [body for body in peer.got if isinstance(body, bytes) and body[5] & FLAG_REFUSED]
        assert len(refused) == (0 if kind == Kind.BROADCAST else 3)


@pytest.mark.parametrize("kind", [Kind.REQUEST, Kind.PUSH, Kind.SURVEY, Kind.BROADCAST])
async def test_a_repeated_or_forged_message_to_a_member_runs_nothing(
    kind: Kind, tmp_path: Path
) -> None:
    ran: list[bytes] = []
    service = noting(ran)
    async with (
        Liar(tmp_path, acknowledging) as liar,
        liar.client() as client,
        client.serve(service),
    ):
        peer = liar.last
        true = peer.sealed(kind, "db", b"once", hop=RELAY_HOP + 1)
        forged = peer.sealed(kind, "db", b"forged", hop=RELAY_HOP + 2, first=1, true=False)
        peer.send(peer.declare(0, kind, "db", member=7), true, true, forged, true)
        await client.flush()
        await client.flush()
        assert ran == [b"once"]
        reasons = [
            body[5] >> 4 for body in peer.got if isinstance(body, bytes) and body[5] & FLAG_REFUSED
        ]
        if kind != Kind.BROADCAST:
            assert reasons == [Refusal.REPLAYED, Refusal.UNREADABLE, Refusal.REPLAYED]


async def test_a_repeated_answer_of_a_survey_counts_once(tmp_path: Path) -> None:
    def script(peer: Peer, body: Control | bytes) -> None:
        if isinstance(body, bytes):
            hop = hop_of(body)
            answer = peer.sealed(
                Kind.ANSWER, "db", b"one", alias=3, hop=hop, suffix=peer.suffix(body)
            )
            forged = peer.sealed(Kind.ANSWER, "db", b"two", alias=3, hop=hop, suffix=bytes(24))
            peer.send(
                frames.Roster(hop, ["a.1", "a.2"]), peer.declare(3, Kind.ANSWER, "db"),
                answer, answer, forged, frames.Done(hop), answer,
            )  # fmt: skip
        else:
            acknowledging(peer, body)

    async with Liar(tmp_path, script) as liar, liar.client() as client:
        survey = client.survey("db", b"?", timeout=5, type=bytes)
        assert [answer async for answer in survey] == [b"one"]
        assert set(survey.missing) == {"a.1", "a.2"}


async def test_a_callback_that_raises_costs_no_session(tmp_path: Path) -> None:
    service = iris.Service("db")
    service.on_broadcast(lambda payload: 1 / 0)
    service.on_loss(lambda lost: 1 / 0)

    def script(peer: Peer, body: Control | bytes) -> None:
        if isinstance(body, bytes) and body[4] == Kind.PUSH:
            peer.send(frames.Fail(hop_of(body), Cause.NO_MEMBERS))
        else:
            acknowledging(peer, body)

    async with (
        Liar(tmp_path, script) as liar,
        liar.client() as client,
        client.serve(service),
        client.subscribe("a.>", lambda message: 1 / 0, on_loss=lambda lost: 1 / 0),
    ):
        client.on_loss = lambda lost: 1 / 0
        peer = liar.last
        peer.send(
            peer.declare(0, Kind.PUBLISH, "a.b"), peer.declare(1, Kind.BROADCAST, "db", member=7)
        )
        peer.send(peer.sealed(Kind.PUBLISH, "a.b", b"", first=0))
        peer.send(peer.sealed(Kind.PUBLISH, "a.b", b"", first=5))
        peer.send(peer.sealed(Kind.BROADCAST, "db", b"", alias=1, first=0))
        peer.send(peer.sealed(Kind.BROADCAST, "db", b"", alias=1, first=5))
        await client.push("db", b"")
        await client.flush()
        assert len(liar.peers) == 1
        # 4 handlers of messages, 2 of gaps, and on_loss for both gaps and the push.
        assert client.counters["failed handlers"] == 9


@pytest.mark.parametrize(
    "kind", [Kind.REQUEST, Kind.PUSH, Kind.SURVEY, Kind.BROADCAST, Kind.PUBLISH, Kind.TUNNEL_OPEN]
)
async def test_after_a_reload_nothing_is_accepted_under_a_retired_key(
    kind: Kind, tmp_path: Path
) -> None:
    """The relay helps the thief of the old key. The process does not rely on which keys the relay considers proven."""
    ran: list[bytes] = []
    service = noting(ran)

    @service.on_tunnel
    async def tunnel(opened: iris.Tunnel) -> None:
        ran.append(b"tunnel")

    service.on_publish("db")(lambda payload: ran.append(payload))
    both = iris.Keyring.single(OTHER_KEY).add("default", KEY)

    def sent(peer: Peer, first: int) -> bytes:
        said = encode_control(peer.declare(0, kind, "db", member=7))
        if kind != Kind.TUNNEL_OPEN:
            return said + peer.sealed(kind, "db", b"old", hop=RELAY_HOP + 1, first=first)
        begun = Handshake(
            True, prologue("db", KEY.key_id, SENDER), KEY.tunnel_psk, bytes(range(32))
        )
        return said + data_frame(kind, begun.write_message(), hop=RELAY_HOP + 1, end=bytes(24))

    async with Liar(tmp_path, acknowledging) as liar:
        config = iris.ClientConfig(relay=liar.path, drain_timeout_s=0.2, reconnect_min_s=0.01)
        async with (
            iris.connect(config=config, keyring=both) as client,
            client.serve(service) as binding,
        ):
            old = liar.last
            old.send(sent(old, 0))
            await client.flush()
            assert ran == ([] if kind == Kind.TUNNEL_OPEN else [b"old"])
            assert old.count(Kind.TUNNEL_ACCEPT) == (kind == Kind.TUNNEL_OPEN)
            await client.reload_keys(both.retire("default"))
            assert client._runtime.find_key(KEY.key_id) is None
            assert binding.key_ids == {OTHER_KEY.key_id}
            new = liar.last
            new.sealers = old.sealers
            new.send(sent(new, 1), frames.Ping(77))
            await eventually(
                lambda: (
                    len(liar.peers) > 2
                    or any(isinstance(body, frames.Pong) and body.id == 77 for body in new.got)
                )
            )
            await client.flush()
            assert len(ran) == (kind != Kind.TUNNEL_OPEN)
            assert new.count(Kind.TUNNEL_ACCEPT) == 0
            proofs = [body for body in new.got if isinstance(body, frames.Prove)]
            assert {proof.public_key for proof in proofs} == {OTHER_KEY.public_key}
