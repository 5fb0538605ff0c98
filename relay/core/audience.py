"""Answers publishers that ask how many subscribers a topic has and which receivers were too slow for it.

TOPIC from a session ──► AUDIENCE: number of subscriptions that this relay knows
TOPIC with `slow` ──► TOPIC to every link with subscribers ──► their AUDIENCEs, or `ASK_US` has passed ──► one AUDIENCE
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import islice
from typing import Final

import msgspec

from iris.wire import frames
from iris.wire.codec import MAX_CONTROL_BYTES
from iris.wire.frames import MAX_SLOW_LISTED, SlowEntry
from iris.wire.kinds import NEVER_US
from iris.wire.names import printable
from relay.core.interest import Interest
from relay.core.link import Link
from relay.core.neighbor import Neighbor
from relay.core.quotas import Table
from relay.core.session import Session
from relay.core.slow import SlowReceivers

ASK_US: Final = 500_000
"""Longest wait for the answers of other relays."""
ENDED: Final = 64
"""Questions that end together, before others get their turn."""
MAX_ASKED: Final = 1024
"""Limit of questions that wait for other relays. Over it, a question is answered with what this relay knows."""
_SLOW_BYTES: Final = MAX_CONTROL_BYTES - 2048
"""Bytes for slow receivers in one AUDIENCE frame, which may also name 64 other keys."""
_ENTRY_BYTES: Final = 48
"""Largest encoded size of one slow receiver, without its texts."""


class _Question:
    """A session's question that some relays have not answered yet. `open`: numbers of their links."""

    __slots__ = ("audience", "open", "session", "until_us")

    def __init__(self, session: Session, audience: frames.Audience, until_us: int) -> None:
        self.session = session
        self.audience = audience
        self.open: set[int] = set()
        self.until_us = until_us


class Audiences:
    """The open questions about topics at one relay."""

    def __init__(
        self, relay: str, interest: Interest, slow: SlowReceivers, table: Table, clock: Callable[[], int]
    ) -> None:  # fmt: skip
        """`relay` is the name of this relay's host, for people."""
        self.deadline_us = NEVER_US
        """When `expire` is due."""
        self._relay = relay
        self._interest = interest
        self._slow = slow
        self._table = table
        self._clock = clock
        self._questions: dict[int, _Question] = {}
        """Our question id -> question, oldest first."""
        self._last = 0

    def ask(self, session: Session, topic: frames.Topic) -> None:
        """Answer a session's question about a topic. The caller has checked that the session has proven the key."""
        audience = self._audience(topic)
        others = self._interest.other_audience(topic.name, topic.key_id)
        audience = msgspec.structs.replace(audience, others=others)
        links = self._interest.links(topic.name, topic.key_id) if topic.slow else []
        if not links or not self._table.has_room(session.user):
            self._answer(session, audience)
            return
        self._last += 1
        self._table.take(session.user)
        question = self._questions[self._last] = _Question(
            session, audience, self._clock() + ASK_US
        )
        for link in links:
            question.open.add(link.number)
            link.control(msgspec.structs.replace(topic, id=self._last))
        self.deadline_us = min(self.deadline_us, question.until_us)

    def asked_by_link(self, link: Link, topic: frames.Topic) -> None:
        """Answer a question that another relay forwarded, with what this relay knows itself."""
        link.control(self._audience(topic))

    def answered(self, link: Link, audience: frames.Audience) -> None:
        """Add a relay's answer to the question. Answers that were not asked for, and second answers, are ignored."""
        question = self._questions.get(audience.id)
        if question is None or link.number not in question.open:
            return
        question.open.remove(link.number)
        slow = [
            msgspec.structs.replace(
                entry, label=printable(entry.label), address=printable(entry.address), relay=printable(entry.relay)
            )
            for entry in audience.slow
        ]  # fmt: skip
        before = question.audience
        question.audience = msgspec.structs.replace(
            before, dropped=_capped(before.dropped + audience.dropped), slow=_fitting([*before.slow, *slow])
        )  # fmt: skip
        if not question.open:
            self._end(audience.id)

    def forget(self, neighbor: Neighbor) -> None:
        """Stop waiting for a link that is closed."""
        for number, question in list(self._questions.items()):
            if neighbor.number in question.open:
                question.open.remove(neighbor.number)
                if not question.open:
                    self._end(number)

    def expire(self, now_us: int) -> None:
        """Answer questions that have waited for `ASK_US` with what has arrived, a few at a time."""
        for number, question in list(islice(self._questions.items(), ENDED)):
            if now_us < question.until_us:
                break
            self._end(number)
        oldest = next(iter(self._questions.values()), None)
        self.deadline_us = NEVER_US if oldest is None else oldest.until_us

    def _end(self, number: int) -> None:
        question = self._questions.pop(number)
        self._table.give(question.session.user)
        if not question.session.closed:
            self._answer(question.session, question.audience)

    def _answer(self, session: Session, audience: frames.Audience) -> None:
        """Answer a session. Process id and address of slow receivers are shown only to the relay's own user,
        as in its status.
        """
        if not session.ours:
            slow = [msgspec.structs.replace(entry, pid=0, address="") for entry in audience.slow]
            audience = msgspec.structs.replace(audience, slow=slow)
        session.control(audience)

    def _audience(self, topic: frames.Topic) -> frames.Audience:
        count = min(self._interest.audience(topic.name, topic.key_id), 0xFFFFFFFF)
        if not topic.slow:
            return frames.Audience(topic.id, count)
        now_us = self._clock()
        found = self._slow.of(topic.name, topic.key_id)
        slow = [
            SlowEntry(each.label, _capped(dropped), now_us - each.since_us, now_us - each.last_us, self._relay, each.pid, each.address, each.link)
            for each, dropped in found[:MAX_SLOW_LISTED]
        ]  # fmt: skip
        dropped = _capped(sum(dropped for _, dropped in found))
        return frames.Audience(topic.id, count, dropped, _fitting(slow))


def _fitting(slow: Sequence[SlowEntry]) -> list[SlowEntry]:
    """Return as many entries as fit in one frame, whatever texts other relays put into theirs."""
    fitting = []
    left = _SLOW_BYTES
    for entry in slow[:MAX_SLOW_LISTED]:
        texts = entry.label + entry.relay + entry.address
        left -= _ENTRY_BYTES + (len(texts) if texts.isascii() else 4 * len(texts))
        if left < 0:
            break
        fitting.append(entry)
    return fitting


def _capped(count: int) -> int:
    return min(count, (1 << 63) - 1)
