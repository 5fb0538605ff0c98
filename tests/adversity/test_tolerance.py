"""Wrong frames that are tolerated: they are answered or dropped, and no session is ended."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest
from adversity.kit import OTHER_KEY, Wire, data_frame, neighbours, tables, unaccounted
from support.relays import KEY, Daemon, client
from support.waiting import PATIENCE_S, eventually

import iris
from iris.wire import frames
from iris.wire.codec import HOP, RELAY_HOP, answer_suffix
from iris.wire.frames import Serving
from iris.wire.kinds import FLAG_REFUSED, Cause, Kind, Refusal

pytestmark = pytest.mark.timeout(60)
CLUSTER = "offended"


@pytest.fixture(scope="module")
def relay(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with Daemon(tmp_path_factory.mktemp("relay")) as daemon:
        yield daemon.socket


SERVING = {int(Kind.REQUEST): Serving(1, 1024)}
REFUSED: dict[str, tuple[frames.Control, str]] = {
    "a subscription outside the grammar": (
        frames.Subscribe(9, "a.>.b", [OTHER_KEY.key_id]),
        "is not a topic filter",
    ),
    "a queue group outside the grammar": (
        frames.Subscribe(9, "a", [OTHER_KEY.key_id], "a b"),
        "is not a queue group",
    ),
    "a subscription under an unproven key": (
        frames.Subscribe(9, "a", [OTHER_KEY.key_id, KEY.key_id]),
        "this session has not proven",
    ),
    "a member outside the grammar": (
        frames.Join(9, "a.*", [OTHER_KEY.key_id], SERVING),
        "is not a cluster name",
    ),
    "a member under an unproven key": (
        frames.Join(9, "echo", [KEY.key_id], SERVING),
        "this session has not proven",
    ),
    "a member that serves replies": (
        frames.Join(9, "a", [OTHER_KEY.key_id], {int(Kind.REPLY): Serving(1, 1)}),
        "can serve requests, pushes, surveys, broadcasts, tunnels and streams",
    ),
    "leaving what was not joined": (frames.Leave(9, 1), "does not have member 1"),
    "unsubscribing what was not subscribed": (
        frames.Unsubscribe(9, "news.>"),
        "not subscribed to 'news.>'",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
async def test_a_control_frame_that_cannot_be_done_is_refused_by_its_ack(
    name: str, relay: Path
) -> None:
    frame, reason = REFUSED[name]
    async with neighbours(relay) as others:
        before = await others.status()
        async with Wire(relay) as wire:
            await wire.prove()
            await wire.send(frame)
            ack = await wire.expect(frames.Ack)
            assert (ack.id, ack.member) == (9, 0)
            assert reason in ack.error
            await wire.alive()
            await others.check()
        assert tables(await others.settled(2)) == tables(before)


async def test_nobody_leaves_for_another_session(relay: Path) -> None:
    async with neighbours(relay) as others, Wire(relay) as wire:
        (echo,) = await others.caller.members("echo")
        serial = int(echo.member.rpartition(".")[2])
        await wire.prove(KEY)
        await wire.send(frames.Leave(9, serial))
        assert (
            await wire.expect(frames.Ack)
        ).error == f"this session does not have member {serial}"
        await wire.send(frames.Credit(serial, Kind.PUSH, [1]))
        await wire.alive()
        await others.check()


async def test_a_second_subscription_of_one_filter_and_group_is_refused(relay: Path) -> None:
    async with Wire(relay) as wire:
        await wire.prove()
        subscribe = frames.Subscribe(1, "a", [OTHER_KEY.key_id])
        in_group = frames.Subscribe(2, "a", [OTHER_KEY.key_id], "g")
        await wire.send(subscribe, subscribe, in_group, in_group)
        errors = [(await wire.expect(frames.Ack)).error for _ in range(4)]
        assert errors == ["", "this session is already subscribed to 'a'"] * 2
        await wire.send(frames.Unsubscribe(3, "a"), frames.Unsubscribe(4, "a"), subscribe)
        errors = [(await wire.expect(frames.Ack)).error for _ in range(3)]
        assert errors == ["", "this session is not subscribed to 'a'", ""]


async def test_a_session_is_in_at_most_128_queue_groups(relay: Path) -> None:
    async with Wire(relay) as wire:
        await wire.prove()
        longest = [f"{number:03}{'g' * 252}" for number in range(129)]
        await wire.send(wire.proof(KEY))
        for number, group in enumerate(longest):
            # With one key, the sessions of one user can use all but a quarter of the groups.
            key = OTHER_KEY if number < 96 else KEY
            await wire.send(frames.Subscribe(number, "a", [key.key_id], group))
            error = (await wire.expect(frames.Ack)).error
            assert bool(error) == (number == 128), error
        # All of them fit into one declaration, so a publication reaches them.
        await wire.send(wire.declare(3, Kind.PUBLISH, "a"))
        await wire.send(wire.sealed(Kind.PUBLISH, "a", alias=3))
        declared = await wire.expect(frames.Declare)
        assert (declared.plain, len(declared.groups)) == (False, 96)
        await wire.data(Kind.PUBLISH)
        await wire.send(frames.Unsubscribe(1, "a", longest[0]))
        assert (await wire.expect(frames.Ack)).error == ""
        await wire.send(frames.Subscribe(2, "b", [OTHER_KEY.key_id], "another"))
        assert (await wire.expect(frames.Ack)).error == ""


async def test_a_label_cannot_speak_to_the_terminal_that_shows_it(relay: Path) -> None:
    async with neighbours(relay) as others, Wire(relay) as wire:
        await wire.send(frames.Hello(1, 0, "\x1b[2Jé\r\n\u202e"))
        await wire.expect(frames.Welcome)
        labels = [session["label"] for session in (await others.status())["sessions"]]
        assert "?[2Jé???" in labels


async def test_unknown_ids_in_frames_without_an_answer_are_passed_over(relay: Path) -> None:
    async with neighbours(relay) as others, Wire(relay) as wire:
        await wire.prove()
        end = HOP.pack(23, Kind.TUNNEL_END, 0, 0, 3, 0) + b"\0"
        await wire.send(
            frames.Credit(123, Kind.PUSH, [5]), frames.Unwatch(9), frames.Pong(7), end
        )  # fmt: skip
        await wire.alive()
        member = await wire.join(CLUSTER, Kind.REQUEST)
        await wire.send(frames.Credit(member, Kind.PUSH, [5]), frames.Credit(member, 999, [1]))
        await wire.alive()
        await others.check()


async def test_answers_to_what_was_never_handed_over_are_dropped_and_counted(relay: Path) -> None:
    async with neighbours(relay) as others:
        before = await others.status()
        async with Wire(relay) as wire:
            await wire.prove()
            await wire.send(
                wire.declare(0, Kind.REPLY, "echo"),
                *(wire.sealed(Kind.REPLY, "echo", hop=RELAY_HOP + hop) for hop in range(50)),
                data_frame(Kind.PUSH, hop=RELAY_HOP + 1, flags=FLAG_REFUSED | Refusal.FULL << 4),
                HOP.pack(30, Kind.TUNNEL_DATA, 0, 0, RELAY_HOP + 1, 0) + bytes(8),
            )
            await wire.alive()
            await others.check()
        after = await others.settled(2)
        assert unaccounted(after) == 0
        dropped, earlier = after["accounts"]["dropped"], before["accounts"]["dropped"]
        assert dropped["late answer"] - earlier.get("late answer", 0) == 51
        assert dropped["late tunnel frame"] - earlier.get("late tunnel frame", 0) == 1
        assert tables(after) == tables(before)


async def test_a_member_that_answers_with_anothers_hop_id_answers_nobody(relay: Path) -> None:
    """Hop ids are looked up in the table of the answering session, so those of other sessions are unknown."""
    service = iris.Service(CLUSTER)
    deferred: list[iris.Deferred] = []

    @service.on_request
    def later(request: iris.Request) -> None:
        deferred.append(request.defer())

    async with (
        client(relay, OTHER_KEY) as member,
        client(relay, OTHER_KEY) as caller,
        member.serve(service),
        Wire(relay) as wire,
    ):
        await wire.prove()
        asked = caller.request("x" + CLUSTER, b"", timeout=PATIENCE_S)
        with pytest.raises(iris.NoMembers):
            await asked
        waiting = asyncio.create_task(caller.request(CLUSTER, b"", timeout=PATIENCE_S))
        await eventually(lambda: deferred)
        # The thief holds the key and guesses every hop id that the relay may have given.
        suffix = answer_suffix(bytes(16), 0)
        await wire.send(wire.declare(0, Kind.REPLY, CLUSTER))
        for hop in range(200):
            reply = wire.sealed(Kind.REPLY, CLUSTER, b"stolen", hop=RELAY_HOP + hop, suffix=suffix)
            await wire.send(reply)
        await wire.alive()
        assert not waiting.done()
        deferred[0].reply(b"true")
        assert await waiting == b"true"


async def test_a_request_sent_back_damaged_fails_for_its_sender_alone(relay: Path) -> None:
    """The relay keeps no bodies: a member may change what it refuses, and the next member cannot open it."""
    service = iris.Service(CLUSTER)
    ran: list[bytes] = []

    @service.on_request
    def run(payload: bytes) -> bytes:
        ran.append(payload)
        return payload

    async with neighbours(relay) as others, Wire(relay) as wire:
        await wire.prove()
        await wire.join(CLUSTER, Kind.REQUEST)
        async with client(relay, OTHER_KEY) as caller, client(relay, OTHER_KEY) as member:
            waiting = asyncio.create_task(caller.request(CLUSTER, b"1", timeout=PATIENCE_S))
            frame = bytearray(await wire.data(Kind.REQUEST))
            async with member.serve(service):
                frame[5] = FLAG_REFUSED | Refusal.FULL << 4
                frame[-1] ^= 1
                await wire.send(bytes(frame))
                with pytest.raises(iris.RelayError, match="could not decrypt"):
                    await waiting
                assert not ran
                await wire.alive()
                await others.check()


@pytest.mark.parametrize("reason", list(Refusal))
async def test_every_reason_of_a_refusal_ends_the_request_with_a_known_cause(
    reason: int, relay: Path
) -> None:
    async with Wire(relay) as wire:
        await wire.prove()
        await wire.join(CLUSTER, Kind.REQUEST)
        await wire.send(
            wire.declare(0, Kind.REQUEST, CLUSTER), wire.sealed(Kind.REQUEST, CLUSTER, hop=6)
        )
        frame = bytearray(await wire.data(Kind.REQUEST))
        frame[5] = FLAG_REFUSED | reason << 4
        await wire.send(bytes(frame))
        fail = await wire.expect(frames.Fail)
        assert fail.hop == 6
        expected: dict[int, Cause] = {
            Refusal.FULL: Cause.OVERLOADED,
            Refusal.LEAVING: Cause.OVERLOADED,
            Refusal.EXPIRED: Cause.EXPIRED,
        }
        assert fail.cause == expected.get(reason, Cause.REFUSED)
        assert fail.may_have_run is (reason in (Refusal.STALE, Refusal.REPLAYED))
        await wire.alive()


@pytest.mark.parametrize("limit_bytes", [1 << 16, 1 << 20])
async def test_no_burst_of_small_messages_becomes_a_frame_over_the_limit(
    limit_bytes: int, tmp_path: Path
) -> None:
    """Bundles are cut by their size with headers."""
    settings = {"IRIS_RELAY_MESSAGE_LIMIT_BYTES": str(limit_bytes)}
    received: list[bytes] = []
    with Daemon(tmp_path, settings=settings) as daemon:
        async with (
            client(daemon.socket) as publisher,
            client(daemon.socket) as subscriber,
            subscriber.subscribe("burst", lambda message: received.append(message.payload)),
        ):
            numbers = [b"%d" % number for number in range(1500)]
            for number in numbers:
                await publisher.publish("burst", number, headers={"x": "y" * 3000})
            for number in numbers:
                await publisher.publish("burst", number)
            for _ in range(100):
                await publisher.publish("burst", bytes(4000))
            await publisher.flush(timeout=PATIENCE_S)
            await eventually(lambda: len(received) == 3100)
            assert received == [*numbers, *numbers, *[bytes(4000)] * 100]
            assert (await publisher.status())["protocol_errors"] == 0
