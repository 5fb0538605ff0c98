"""All offences of a session, and the rule that the relay names when it ends the session."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Final

import msgspec
from adversity.kit import OTHER_KEY, Wire, control_frame, data_frame
from support.relays import KEY

from iris.wire import frames
from iris.wire.codec import DEFAULT_MESSAGE_LIMIT, FRAME_OVERHEAD, HOP, RELAY_HOP, encode_control
from iris.wire.kinds import FLAG_MORE, FLAG_REFUSED, Kind, Refusal

Offence = Callable[[Wire], Awaitable[None]]
OFFENCES: Final[dict[str, tuple[Offence, str]]] = {}
"""Name -> (function that commits the offence, regular expression for the ERROR)."""

FIRST_LIMIT: Final = 65_536
LIMIT: Final = DEFAULT_MESSAGE_LIMIT + FRAME_OVERHEAD
CLUSTER: Final = "offended"


def offence(rule: str) -> Callable[[Offence], Offence]:
    """Register an offence of a connected session; `rule` is a regular expression for the ERROR."""

    def register(function: Offence) -> Offence:
        OFFENCES[function.__name__.replace("_", " ")] = function, rule
        return function

    return register


# -- lengths ---------------------------------------------------------------------------------------------------


def _length(size: int, *, proven: bool) -> None:
    limit = LIMIT if proven else FIRST_LIMIT

    async def send(wire: Wire) -> None:
        if proven:
            await wire.prove()
            await wire.alive()
        await wire.send(size.to_bytes(4, "little") + b"\x17\x00")

    name = f"a frame of {size} bytes {'after' if proven else 'before'} a proof"
    OFFENCES[name] = send, f"^a frame declares {size} bytes; 2 to {limit} are allowed here$"


for _size in (0, 1, FIRST_LIMIT + 1, (1 << 32) - 1):
    _length(_size, proven=False)
for _size in (0, 1, LIMIT + 1, (1 << 32) - 1):
    _length(_size, proven=True)


@offence("^a PING frame of 65543 bytes is over the limit of 65542$")
async def a_control_frame_over_64_KiB(wire: Wire) -> None:  # noqa: N802 - a unit
    await wire.prove()
    await wire.alive()
    await wire.send(control_frame(Kind.PING, bytes(65_537)))


# -- kinds and types -------------------------------------------------------------------------------------------


@offence("^frame kind 0x3f is not known$")
async def an_unknown_control_kind(wire: Wire) -> None:
    await wire.greet()
    await wire.send(control_frame(0x3F, b"\x80"))


@offence("^frame kind 0x50 is not known$")
async def an_unknown_data_kind(wire: Wire) -> None:
    await wire.greet()
    await wire.send(data_frame(0x50))


@offence("^frame kind 0x00 is not known$")
async def a_first_frame_of_an_unknown_kind(wire: Wire) -> None:
    await wire.send(control_frame(0, b""))


@offence("^unexpected Welcome frame from a session$")
async def a_frame_that_only_relays_send(wire: Wire) -> None:
    await wire.greet()
    await wire.send(frames.Welcome(1, 0, bytes(16), bytes(8), bytes(32), 1 << 20))


@offence("^a PING frame cannot be decoded: ")
async def a_wrong_type(wire: Wire) -> None:
    await wire.greet()
    await wire.send(control_frame(Kind.PING, msgspec.msgpack.encode({"id": "one"})))


@offence("^a SUBSCRIBE frame cannot be decoded: ")
async def an_array_instead_of_a_map(wire: Wire) -> None:
    await wire.greet()
    await wire.send(control_frame(Kind.SUBSCRIBE, msgspec.msgpack.encode([1, "a"])))


@offence("^a PING frame cannot be decoded: ")
async def a_number_over_63_bits(wire: Wire) -> None:
    await wire.greet()
    await wire.send(control_frame(Kind.PING, msgspec.msgpack.encode({"id": 1 << 63})))


@offence("^a JOIN frame cannot be decoded: ")
async def a_missing_field(wire: Wire) -> None:
    await wire.greet()
    await wire.send(control_frame(Kind.JOIN, msgspec.msgpack.encode({"id": 1})))


@offence("^a PROVE frame cannot be decoded: ")
async def truncated_MessagePack(wire: Wire) -> None:  # noqa: N802 - its name
    await wire.greet()
    whole = encode_control(wire.proof(OTHER_KEY))
    await wire.send(control_frame(Kind.PROVE, whole[6:-1]))


@offence("^a PING frame cannot be decoded: ")
async def bytes_after_the_MessagePack(wire: Wire) -> None:  # noqa: N802 - its name
    await wire.greet()
    await wire.send(control_frame(Kind.PING, msgspec.msgpack.encode({"id": 1}) + b"\xc0"))


@offence("^a SUBSCRIBE frame cannot be decoded: ")
async def a_text_that_is_not_UTF8(wire: Wire) -> None:  # noqa: N802 - its name
    await wire.greet()
    body = b"\x83\xa2id\x01\xa6filter\xa2\xc3\x28\xa7key_ids\x90"
    await wire.send(control_frame(Kind.SUBSCRIBE, body))


@offence("^a SUBSCRIBE frame cannot be decoded: ")
async def an_array_of_four_billion(wire: Wire) -> None:
    await wire.greet()
    body = b"\x83\xa2id\x01\xa6filter\xa1a\xa7key_ids\xdd\xff\xff\xff\xff"
    await wire.send(control_frame(Kind.SUBSCRIBE, body))


@offence("^a HELLO frame cannot be decoded: ")
async def a_depth_of_ten_thousand(wire: Wire) -> None:
    await wire.send(control_frame(Kind.HELLO, b"\x81\xa1x" + b"\x91" * 10_000 + b"\xc0"))


# -- order -----------------------------------------------------------------------------------------------------


@offence("^Ping before HELLO$")
async def a_control_frame_before_HELLO(wire: Wire) -> None:  # noqa: N802 - a kind
    await wire.send(frames.Ping(1))


@offence("^alias 0 was not declared for this kind of frame$")
async def a_publication_before_HELLO(wire: Wire) -> None:  # noqa: N802 - a kind
    await wire.send(data_frame(Kind.PUBLISH))


@offence("^data frame before HELLO$")
async def a_tunnel_record_before_HELLO(wire: Wire) -> None:  # noqa: N802 - a kind
    await wire.send(HOP.pack(22, Kind.TUNNEL_DATA, 0, 0, 1, 0))


@offence("^data frame before HELLO$")
async def a_refusal_before_HELLO(wire: Wire) -> None:  # noqa: N802 - a kind
    flags = FLAG_REFUSED | Refusal.FULL << 4
    await wire.send(data_frame(Kind.REQUEST, flags=flags, hop=RELAY_HOP + 1))


@offence("^unexpected Hello frame from a session$")
async def a_second_HELLO(wire: Wire) -> None:  # noqa: N802 - a kind
    await wire.greet()
    await wire.send(frames.Hello(1, 0))


@offence("protocol version 2, this relay 1;")
async def another_version(wire: Wire) -> None:
    await wire.send(frames.Hello(2, 0))


# -- keys ------------------------------------------------------------------------------------------------------


@offence("^the proof does not match its key")
async def a_forged_proof(wire: Wire) -> None:
    await wire.greet()
    await wire.send(frames.Prove(0, KEY.public_key, wire.proof(OTHER_KEY).signature))


@offence("^the proof does not match its key")
async def a_proof_of_another_session(wire: Wire) -> None:
    async with Wire(wire.path) as other:
        await other.greet()
        await wire.greet()
        await wire.send(other.proof(OTHER_KEY))


@offence("at most 1024 keys$")
async def a_proof_too_many(wire: Wire) -> None:
    from iris.crypto.keys import ClusterKey

    await wire.greet()
    keys = (ClusterKey(number.to_bytes(32, "big")) for number in range(1, 1026))
    await wire.send(*(wire.proof(key) for key in keys))


@offence(f"^alias under key {KEY.key_id.hex()[:8]}, which this session has not proven$")
async def an_alias_under_an_unproven_key(wire: Wire) -> None:
    await wire.prove()
    wire.key = KEY
    await wire.send(wire.declare(0, Kind.PUBLISH, "a"))


@offence("^MEMBERS under a key that this session has not proven$")
async def members_under_an_unproven_key(wire: Wire) -> None:
    await wire.prove()
    await wire.send(frames.Members(1, "echo", [KEY.key_id]))


# -- aliases and names -----------------------------------------------------------------------------------------


@offence("^alias 7 was not declared for this kind of frame$")
async def an_undeclared_alias(wire: Wire) -> None:
    await wire.prove()
    await wire.send(wire.sealed(Kind.PUBLISH, "a", alias=7))


@offence("^alias 4294967295 was not declared for this kind of frame$")
async def an_alias_over_all_bounds(wire: Wire) -> None:
    await wire.prove()
    await wire.send(wire.sealed(Kind.REQUEST, "a", alias=(1 << 32) - 1))


@offence("^alias 0 was not declared for this kind of frame$")
async def an_alias_used_for_another_kind(wire: Wire) -> None:
    await wire.prove()
    await wire.send(wire.declare(0, Kind.PUSH, CLUSTER), wire.sealed(Kind.REQUEST, CLUSTER))


@offence("kind 0x4a, which have none$")
async def an_alias_for_tunnel_records(wire: Wire) -> None:
    await wire.prove()
    await wire.send(wire.declare(0, Kind.TUNNEL_DATA, CLUSTER))


@offence("is not a cluster name")
async def a_cluster_outside_the_grammar(wire: Wire) -> None:
    await wire.prove()
    await wire.send(wire.declare(0, Kind.REQUEST, "a..b"))


@offence("is not a topic")
async def a_topic_with_a_wildcard(wire: Wire) -> None:
    await wire.prove()
    await wire.send(wire.declare(0, Kind.PUBLISH, "a.*"))


@offence("is over the limit of 255 bytes or 32 parts")
async def a_topic_of_33_tokens(wire: Wire) -> None:
    await wire.prove()
    await wire.send(wire.declare(0, Kind.PUBLISH, ".".join("a" * 33)))


@offence("is not a cluster name")
async def members_of_a_name_outside_the_grammar(wire: Wire) -> None:
    await wire.prove()
    await wire.send(frames.Members(1, "a b", [OTHER_KEY.key_id]))


@offence("^watch id 1 is already in use$")
async def two_watches_of_one_id(wire: Wire) -> None:
    await wire.prove()
    watch = frames.Members(1, CLUSTER, [OTHER_KEY.key_id], watch=True)
    await wire.send(watch, watch)


# -- data frames -----------------------------------------------------------------------------------------------


@offence("^data frame of [0-9]+ bytes is shorter than")
async def a_publication_cut_short(wire: Wire) -> None:
    await wire.prove()
    await wire.send(wire.declare(0, Kind.PUBLISH, "a"), HOP.pack(22, Kind.PUBLISH, 0, 0, 0, 0))


@offence("^data frame of [0-9]+ bytes is shorter than")
async def a_reply_cut_short(wire: Wire) -> None:
    await wire.prove()
    await wire.send(wire.declare(0, Kind.REPLY, CLUSTER), b"\x02\0\0\0" + bytes((Kind.REPLY, 0)))


@offence("^tunnel frame of [0-9]+ bytes is shorter than")
async def a_tunnel_record_cut_short(wire: Wire) -> None:
    await wire.prove()
    await wire.send(b"\x02\0\0\0" + bytes((Kind.TUNNEL_DATA, 0)))


@offence("^hop id [0-9]+ is in the range reserved for this relay$")
async def a_hop_id_of_the_relays_half(wire: Wire) -> None:
    await wire.prove()
    request = wire.sealed(Kind.REQUEST, "echo", hop=RELAY_HOP | 1)
    await wire.send(wire.declare(0, Kind.REQUEST, "echo"), request)


@offence("^frame of 92 bytes cannot hold 4294967295 messages$")
async def a_bundle_of_four_billion_messages(wire: Wire) -> None:
    await wire.prove()
    bundle = wire.sealed(Kind.PUBLISH, "a", count=(1 << 32) - 1)
    await wire.send(wire.declare(0, Kind.PUBLISH, "a"), bundle)


@offence("^frame of 92 bytes cannot hold 0 messages$")
async def a_bundle_of_no_messages(wire: Wire) -> None:
    await wire.prove()
    await wire.send(wire.declare(0, Kind.PUBLISH, "a"), wire.sealed(Kind.PUBLISH, "a", count=0))


@offence("^flags 0x01 are not allowed in a PUBLISH frame$")
async def a_publication_that_goes_on(wire: Wire) -> None:
    await wire.prove()
    await wire.send(
        wire.declare(0, Kind.PUBLISH, "a"), wire.sealed(Kind.PUBLISH, "a", flags=FLAG_MORE)
    )


@offence("^flags 0x02 are not allowed in a refused frame$")
async def a_refusal_without_a_reason(wire: Wire) -> None:
    await wire.prove()
    await wire.send(data_frame(Kind.REQUEST, flags=FLAG_REFUSED, hop=RELAY_HOP + 1))


@offence("^flags 0x12 are not allowed in a REPLY frame$")
async def a_reply_that_is_given_back(wire: Wire) -> None:
    await wire.prove()
    await wire.send(wire.declare(0, Kind.REPLY, "a"))
    await wire.send(data_frame(Kind.REPLY, flags=FLAG_REFUSED | Refusal.FULL << 4))


@offence(
    "^FAULT for other under key e8d1ab2c… cannot answer a request for offended under key e8d1ab2c…$"
)
async def an_answer_of_another_cluster(wire: Wire) -> None:
    await answer_under(wire, Kind.FAULT, "other", Kind.REQUEST)


@offence("^ANSWER for offended under key e8d1ab2c… cannot answer a request for offended")
async def an_answer_to_a_survey_for_a_request(wire: Wire) -> None:
    await answer_under(wire, Kind.ANSWER, CLUSTER, Kind.REQUEST)


@offence("^REPLY for offended under key e8d1ab2c… cannot answer a push for offended")
async def a_reply_to_a_push(wire: Wire) -> None:
    await answer_under(wire, Kind.REPLY, CLUSTER, Kind.PUSH)


@offence("^STREAM_REPLY for offended under key e8d1ab2c… cannot answer a survey for offended")
async def a_stores_answer_to_a_survey(wire: Wire) -> None:
    await answer_under(wire, Kind.STREAM_REPLY, CLUSTER, Kind.SURVEY)


async def answer_under(wire: Wire, kind: int, name: str, asked: int) -> None:
    """Call this session itself, and answer with a frame of `kind` for the cluster `name`."""
    await wire.prove()
    await wire.join(CLUSTER, asked)
    await wire.send(wire.declare(0, asked, CLUSTER), wire.sealed(asked, CLUSTER, hop=6))
    hop = HOP.unpack_from(await wire.data(asked))[4]
    await wire.send(wire.declare(1, kind, name), data_frame(kind, bytes(40), alias=1, hop=hop))


@offence("^hop id 5 is already in use by an open tunnel$")
async def one_tunnel_twice(wire: Wire) -> None:
    await wire.prove()
    await wire.join(CLUSTER, Kind.TUNNEL_OPEN)
    opening = data_frame(Kind.TUNNEL_OPEN, bytes(48), hop=5)
    await wire.send(wire.declare(0, Kind.TUNNEL_OPEN, CLUSTER), opening, opening)


@offence("^TUNNEL_END must carry at most one byte")
async def a_long_tunnel_end(wire: Wire) -> None:
    await wire.prove()
    await wire.join(CLUSTER, Kind.TUNNEL_OPEN)
    end = HOP.pack(1022, Kind.TUNNEL_END, 0, 0, 5, 0) + bytes(1000)
    opening = data_frame(Kind.TUNNEL_OPEN, bytes(48), hop=5)
    await wire.send(wire.declare(0, Kind.TUNNEL_OPEN, CLUSTER), opening, end)


# -- what members owe ------------------------------------------------------------------------------------------


@offence("^CREDIT for a push that was not dispatched")
async def credit_for_what_was_not_handed_over(wire: Wire) -> None:
    await wire.prove()
    member = await wire.join(CLUSTER, Kind.PUSH)
    await wire.send(frames.Credit(member, Kind.PUSH, [RELAY_HOP + 1]))


@offence("^CREDIT for a push that was not dispatched")
async def credit_for_more_than_was_handed_over(wire: Wire) -> None:
    await wire.prove()
    member = await wire.join(CLUSTER, Kind.PUSH)
    await wire.send(wire.declare(0, Kind.PUSH, CLUSTER), wire.sealed(Kind.PUSH, CLUSTER, hop=1))
    handed = await wire.data(Kind.PUSH)
    hop = HOP.unpack_from(handed)[4]
    await wire.send(frames.Credit(member, Kind.PUSH, [hop, hop]))


@offence("^CREDIT for a request that was not dispatched")
async def credit_for_a_request(wire: Wire) -> None:
    await wire.prove()
    member = await wire.join(CLUSTER, Kind.REQUEST)
    await wire.send(
        wire.declare(0, Kind.REQUEST, CLUSTER), wire.sealed(Kind.REQUEST, CLUSTER, hop=1)
    )
    handed = await wire.data(Kind.REQUEST)
    await wire.send(frames.Credit(member, Kind.REQUEST, [HOP.unpack_from(handed)[4]]))


@offence("^a refused call was returned with another kind or length$")
async def a_refused_frame_sent_back_longer(wire: Wire) -> None:
    await wire.prove()
    await wire.join(CLUSTER, Kind.REQUEST)
    await wire.send(
        wire.declare(0, Kind.REQUEST, CLUSTER), wire.sealed(Kind.REQUEST, CLUSTER, hop=1)
    )
    frame = bytearray(await wire.data(Kind.REQUEST))
    frame[:4] = (len(frame) - 3).to_bytes(4, "little")
    frame[5] = FLAG_REFUSED | Refusal.FULL << 4
    await wire.send(bytes(frame) + b"\0")


@offence("^a refused call was returned with another kind or length$")
async def a_refused_frame_sent_back_as_another_kind(wire: Wire) -> None:
    await wire.prove()
    await wire.join(CLUSTER, Kind.REQUEST)
    await wire.send(
        wire.declare(0, Kind.REQUEST, CLUSTER), wire.sealed(Kind.REQUEST, CLUSTER, hop=1)
    )
    frame = bytearray(await wire.data(Kind.REQUEST))
    frame[4] = Kind.PUSH
    frame[5] = FLAG_REFUSED | Refusal.FULL << 4
    await wire.send(bytes(frame))
