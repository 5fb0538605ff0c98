"""Aliases that a session may not have: the refusal, and the frames that it sent before it knew.

    DECLARE ── the ticket denies it, or the user's share is used up ──► UNROUTED with the alias; nothing is kept of it
    frames under that alias ── calls ──► FAIL    answers ──► FAIL to their callers    casts ──► dropped and counted

A session declares the alias again when it next uses the address. So a ticket that was renewed, or a share that has
room again, needs no other notice.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from iris.errors import PeerProtocolError
from iris.wire.frames import Fail, Unrouted
from iris.wire.kinds import Cause
from relay.core.answers import Answers
from relay.core.heads import CALL_KINDS, CASTS, unrouted
from relay.core.ports import Accounts
from relay.core.session import Session

MAX_REASONS: Final = 32
"""Refused aliases of one session whose reasons are known; frames under earlier ones get the latest reason."""
"""The cause of drops."""


class RefusedAliases:
    """Refuses aliases of the sessions of one relay."""

    def __init__(self, accounts: Accounts, answers: Answers) -> None:
        self._accounts = accounts
        self._answers = answers

    def refuse(
        self, session: Session, alias: int, kind: int, name: str, key_id: bytes, cause: Cause, why: str
    ) -> None:  # fmt: skip
        """Notify a session that it does not have an alias. The cause OVERLOADED says that it can have no more."""
        reasons = session.refused
        reasons.pop(alias, None)
        if len(reasons) >= MAX_REASONS:
            del reasons[next(iter(reasons))]
        reasons[alias] = cause, why
        full = cause == Cause.OVERLOADED
        session.control(Unrouted(kind, name, key_id, 0, why, alias=alias, full=full))

    def frame(
        self, session: Session, buf: memoryview, start: int, end: int, error: PeerProtocolError
    ) -> bool:
        """Refuse a frame whose alias stands for nothing. Raises `error` if the session was refused no alias."""
        if not session.refused:
            raise error
        kind, alias, hops = unrouted(session, buf, start, end)
        cause, why = session.refused.get(alias) or next(reversed(session.refused.values()))
        if kind in CASTS:
            self._accounts.in_ += len(hops)
            self._accounts.drop("alias refused", len(hops))
        elif kind in CALL_KINDS:
            self._accounts.in_ += len(hops)
            self._accounts.refused += len(hops)
            for hop in hops:
                session.control(Fail(hop, cause, why))
        else:
            self._answer(session, kind, hops, why)
        return True

    def _answer(self, session: Session, kind: int, hops: Sequence[int], why: str) -> None:
        """Drop answers, whose callers get FAIL."""
        for hop in hops:
            self._answers.dropped(
                session, kind, hop, "alias refused", f"the relay dropped the member's answer: {why}"
            )
