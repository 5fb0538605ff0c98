"""Shares of a turn, and what bounds the cost of one frame."""

from __future__ import annotations

from proofs.sabotages.sabotage import Sabotage

TURNS = ("tests/unit/relay/net/test_turns.py",)
SESSIONS = ("tests/unit/relay/net/test_session_turns.py",)
WATCHES = ("tests/protocol/test_watches.py",)
BOUNDS = ("tests/protocol/test_bounds.py",)
WORK = ("tests/protocol/test_bounded_work.py",)
WEB = ("tests/integration/test_web_attacks.py",)

SABOTAGES: tuple[Sabotage, ...] = (
    Sabotage(
        "questions-of-the-lost",
        "relay/net/sessions.py",
        "SessionPort._unanswered",
        "buf[start + KIND_AT] in _QUESTIONS",
        "False",
        SESSIONS,
        "the session of a process that ended stays for minutes, and answers nobody",
    ),
    Sabotage(
        "questions-end-at-once",
        "relay/core/audience.py",
        "Audiences.expire",
        "islice(self._questions.items(), ENDED)",
        "self._questions.items()",
        WORK,
        "a thousand questions that other relays do not answer hold the relay as they end",
    ),
    Sabotage(
        "status-at-once",
        "relay/core/control.py",
        "SessionControl._report_in_parts",
        "document.add(part)",
        "[document.add(each) for each in (part, *parts)]",
        WORK,
        "one session that asks for the status holds the relay for as long as it takes to show all names",
    ),
    Sabotage(
        "statuses-at-once",
        "relay/core/control.py",
        "SessionControl._on_status",
        "self._reports >= MAX_REPORTS",
        "False",
        WORK,
        "any number of sessions fill the memory of the relay with unfinished answers to STATUS",
    ),
    Sabotage(
        "turn-share",
        "relay/net/turns.py",
        "Turn.has_time",
        "time.monotonic_ns() < 1000 * begun_us + share_ns",
        "True",
        (*TURNS, *SESSIONS),
        "a connection is handled for as long as it sends",
    ),
    Sabotage(
        "turn-round",
        "relay/net/turns.py",
        "Turns._turn",
        "time.monotonic_ns() < until_ns",
        "True",
        TURNS,
        "very many connections hold a relay together",
    ),
    Sabotage(
        "turn-users",
        "relay/net/turns.py",
        "Turns._turn",
        "self._users[user] = connections",
        "self._users = {user: connections, **self._users}",
        TURNS,
        "a user with many connections keeps the others from their turns",
    ),
    Sabotage(
        "turn-unread",
        "relay/core/router.py",
        "Router._beat",
        "pulse.dead(self.now_us) and neighbor.port.unread",
        "False",
        BOUNDS,
        "a relay that was too busy to read cuts its links as silent",
    ),
    Sabotage(
        "turn-lost",
        "relay/net/sessions.py",
        "SessionPort.connection_lost",
        "self._reader.waiting and not (self._closed or self._finishing)",
        "False",
        SESSIONS,
        "what a session sent before its connection was lost is not handled",
    ),
    Sabotage(
        "turn-overdue",
        "relay/net/sessions.py",
        "SessionPort.buffer_updated",
        "reader.waiting and not self._is_done()",
        "False",
        SESSIONS,
        "frames that wait are forgotten",
    ),
    Sabotage(
        "web-idle",
        "relay/net/websession.py",
        "WebConnection._frame",
        "self._is_idle(frame) and not self._may_be_idle()",
        "False",
        WEB,
        "a stranger sends pings without end",
    ),
    Sabotage(
        "web-empty-messages",
        "relay/net/websession.py",
        "WebConnection._is_idle",
        "frame.data or ends",
        "frame.data or frame.fin",
        WEB,
        "a stranger sends messages without content without end",
    ),
    Sabotage(
        "watches-step",
        "relay/core/watches.py",
        "Watches.expire",
        "cluster.to_tell and left > 0",
        "cluster.to_tell",
        WATCHES,
        "one join holds a relay for as long as it takes to tell all watches",
    ),
    Sabotage(
        "watches-unknown",
        "relay/core/watches.py",
        "Watches.left",
        "first > cluster.since",
        "False",
        WATCHES,
        "members that come and go make what watches are sent longer and longer",
    ),
    Sabotage(
        "topic-nodes",
        "relay/core/interest.py",
        "_matching",
        "min(MAX_WIDTH, look.nodes)",
        "1 << 60",
        BOUNDS,
        "one question about a topic looks at the whole tree",
    ),
    Sabotage(
        "cast-parts",
        "relay/core/casts.py",
        "Casts._fan_out",
        "len(targets) <= PART",
        "True",
        BOUNDS,
        "one publication to thousands holds a relay until all of them have it",
    ),
)
