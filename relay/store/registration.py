"""What a store has registered at its relay: granted orders, served addresses, and the topics and
clusters it records.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, Final

from iris.crypto.keys import StoreKey
from iris.wire.frames import Leave, Serving, Subscribe, Unsubscribe
from iris.wire.kinds import NO_KEY, STORES, Kind
from relay.store.session import StoreSession
from relay.store.stream import Stream

log = logging.getLogger(__name__)

CALLS: Final = Serving(65_536, 1 << 30)
"""Waiting readers count as running calls."""
PUSHES: Final = Serving(4096, 64 << 20)
_STREAM: Final = {int(Kind.STREAM): CALLS}
_SHARE: Final = {int(Kind.PUSH): PUSHES, int(Kind.BROADCAST): PUSHES}

Done = Callable[[str], object]
"""Called with the relay's error, or "" if everything was accepted."""


class AckWaiter:
    """A `Waiter` for one Ack: calls `then` with the error ("" if none) and the number of the new member."""

    def __init__(
        self, then: Callable[[str, int], None], late: Callable[[str], None] | None = None
    ) -> None:
        """`late` is called first, with the error, if the Ack refuses or says that the relay had
        already routed messages.
        """
        self._then: Callable[[str, int], None] | None = then
        self._late = late

    def done(self) -> bool:
        return self._then is None

    def set_result(self, result: Any, /) -> None:
        if self._late is not None and (result.error or not result.fresh):
            self._late(result.error)
        self._finish(result.error, result.member)

    def set_exception(self, exception: BaseException, /) -> None:
        self._finish(str(exception), 0)

    def _finish(self, error: str, member: int) -> None:
        then, self._then = self._then, None
        if then is not None:
            then(error, member)


class PongWaiter:
    """A `Waiter` for one Pong: calls `then`, but not if the session ends first."""

    def __init__(self, then: Callable[[], None]) -> None:
        self._then = then
        self._done = False

    def done(self) -> bool:
        return self._done

    def set_result(self, result: Any, /) -> None:
        self._done = True
        self._then()

    def set_exception(self, exception: BaseException, /) -> None:
        self._done = True


class PendingReplies:
    """Collects the replies to several control frames: calls `then` once, after the last reply, with
    the first error.
    """

    def __init__(self, then: Done) -> None:
        self._then = then
        self._open = 1
        self._error = ""

    def expect(
        self, also: Callable[[int], None] | None = None, late: Callable[[str], None] | None = None
    ) -> AckWaiter:
        """Return the waiter for one more reply; on success `also` is called with the number of the
        new member.
        """
        self._open += 1

        def then(error: str, member: int) -> None:
            if error:
                self._error = self._error or error
            elif also is not None:
                also(member)
            self._count_down()

        return AckWaiter(then, late)

    def all_sent(self) -> None:
        """Mark that all frames are sent, so that `then` may be called."""
        self._count_down()

    def _count_down(self) -> None:
        self._open -= 1
        if not self._open:
            self._then(self._error)


class Registration:
    """The registrations of one store at one relay. All of them are lost with the session."""

    def __init__(
        self, key: StoreKey, address: str, late: Callable[[], None], refused: Callable[[Iterable[Stream]], None]
    ) -> None:  # fmt: skip
        """`late` is called when the relay had routed messages before it received our interest; `refused`
        with the streams whose interest it refused."""
        self.session: StoreSession | None = None
        self.members: dict[int, Stream] = {}
        """Member number -> the stream that it records for, for members that receive a share of a
        cluster's messages.
        """
        self.leaving = False
        """The relay has announced that it is about to stop."""
        self.blocked = False
        """The relay is not reading our answers, so readers must wait."""
        self.group: StoreKey | None = None
        """The key that the orders of streams in a bucket name."""
        self._key = key
        self._late = late
        self._refused = refused
        self._address = address
        self._served: dict[bytes, list[int]] = {}
        """Stream uuid -> numbers of its members."""
        self._filters: dict[str, tuple[bytes, ...]] = {}
        """Current subscriptions: topic filter -> key ids."""
        self._granted: set[tuple[bytes, bytes]] = set()
        """(uuid, key id) of the orders that the relay has accepted.

        What an order names changes only when a copy is promoted.
        """

    def attach(self, session: StoreSession) -> None:
        """Start with a new session: serve the addresses at which clients create streams."""
        self.detach()
        self.session = session
        self.leaving = False
        replies = PendingReplies(log_refusal("stores"))
        for name, tag in ((STORES, self._address), (self._address, "")):
            session.join(name, [NO_KEY], _STREAM, tag, replies.expect())
        replies.all_sent()

    def detach(self) -> None:
        """Clear everything: the session has ended."""
        self.session = None
        self.members.clear()
        self._served.clear()
        self._filters.clear()
        self._granted.clear()

    def serve(
        self, stream: Stream, dead: Stream | None, all_streams: Iterable[Stream], then: Done
    ) -> None:
        """Send a stream's orders to the relay, serve the stream and its dead letters, and subscribe
        to what it records.
        """
        session = self.session
        if session is None:
            then("the store has no connection to a relay")
            return
        replies = PendingReplies(then)
        definition, key_ids = stream.definition, stream.key_ids
        for key_id, (_, signed) in stream.orders.items():
            if (stream.uuid, key_id) not in self._granted:
                grant = (stream.uuid, key_id)
                session.grant(
                    self.key_of(stream), signed, replies.expect(partial(self._note_granted, grant))
                )
        recording = stream.log is not None and not definition.stopped and not stream.why_superseded
        for held in (stream, dead):
            if held is not None:
                uuid = held.uuid.hex()
                served = self._track_member(stream)
                session.join(uuid, key_ids, _STREAM, held.name, replies.expect(served))
                if (
                    not stream.why_superseded and not definition.parent
                ):  # else it is found by its uuid alone
                    session.join(held.name, key_ids, _STREAM, uuid, replies.expect(served))
        if definition.cluster and recording:
            shares = self._track_member(stream, shares=True)
            late = partial(self._note_missed, [stream])
            session.join(
                definition.cluster, stream.recording_ids, _SHARE, "", replies.expect(shares, late)
            )
        if definition.topic and recording:
            self._update_subscription(session, definition.topic, all_streams, replies)
        replies.all_sent()

    def key_of(self, stream: Stream) -> StoreKey:
        """Return the key that the orders of a stream name: the store's own, or that of its bucket's stores."""
        group = self.group
        return (
            group if group is not None and stream.charter.store == group.public_key else self._key
        )

    def _note_missed(self, streams: Sequence[Stream], error: str) -> None:
        """Report that the relay refused the interest of these streams, or had routed messages
        before it received it.
        """
        if error:
            self._refused(streams)
        else:
            self._late()

    def _track_member(self, stream: Stream, *, shares: bool = False) -> Callable[[int], None]:
        """Return a callback that stores a new member of a stream.

        If `leave` was called before the relay answered, the callback makes the member leave at once.
        """
        members = self._served.setdefault(stream.uuid, [])

        def joined(member: int) -> None:
            if self._served.get(stream.uuid) is members:
                members.append(member)
                if shares:
                    self.members[member] = stream
            elif self.session is not None:
                replies = PendingReplies(log_refusal(stream.name))
                _leave(self.session, member, replies)
                replies.all_sent()

        return joined

    def forget_grants(self, stream: Stream) -> None:
        """Send a stream's orders again at the next `serve`, because they name more than the relay
        has accepted.
        """
        self._granted = {grant for grant in self._granted if grant[0] != stream.uuid}

    def _note_granted(self, grant: tuple[bytes, bytes], member: int) -> None:
        self._granted.add(grant)

    def serve_dead(self, stream: Stream, dead: Stream) -> None:
        """Serve the new dead letters of a stream."""
        if self.session is not None:
            uuid = dead.uuid.hex()
            replies = PendingReplies(log_refusal(dead.name))
            served = self._track_member(stream)
            self.session.join(uuid, stream.key_ids, _STREAM, dead.name, replies.expect(served))
            if not stream.definition.parent:
                self.session.join(dead.name, stream.key_ids, _STREAM, uuid, replies.expect(served))
            replies.all_sent()

    def leave(self, stream: Stream, others: Iterable[Stream]) -> None:
        """Stop serving and recording a stream; `others` continue to record."""
        session = self.session
        members = self._served.pop(stream.uuid, [])
        if session is None:
            return
        replies = PendingReplies(log_refusal(stream.name))
        for member in members:
            self.members.pop(member, None)
            _leave(session, member, replies)
        if stream.definition.topic:
            self._update_subscription(session, stream.definition.topic, others, replies)
        replies.all_sent()

    def _update_subscription(
        self, session: StoreSession, topic: str, streams: Iterable[Stream], replies: PendingReplies
    ) -> None:
        """Subscribe to a filter under all key ids with which the served `streams` record it.

        Streams that are not served yet do not count, because the relay does not know their orders.
        The frames are sent together, so the relay routes nothing between the old subscription and
        the new one.
        """
        found: dict[bytes, None] = {}
        recorders = []
        for stream in streams:
            definition = stream.definition
            recording = not definition.stopped and stream.log is not None
            if definition.topic == topic and recording and stream.uuid in self._served:
                found.update(dict.fromkeys(stream.recording_ids))
                recorders.append(stream)
        wanted = tuple(found)
        if wanted == self._filters.get(topic, ()):
            return
        if self._filters.pop(topic, None):
            session.ask(lambda number: Unsubscribe(number, topic), replies.expect())
        if wanted:
            self._filters[topic] = wanted

            def late(error: str) -> None:
                if error:
                    self._filters.pop(topic, None)  # so that it is requested again
                self._note_missed(recorders, error)

            session.ask(
                lambda number: Subscribe(number, topic, list(wanted)), replies.expect(late=late)
            )


def _leave(session: StoreSession, member: int, replies: PendingReplies) -> None:
    session.ask(lambda number: Leave(number, member), replies.expect())


def log_refusal(what: str) -> Done:
    """Return a callback that logs an error reported by the relay."""

    def then(error: str) -> None:
        if error:
            log.warning(
                "store.refused_by_relay", extra={"fields": {"stream": what, "error": error}}
            )

    return then
