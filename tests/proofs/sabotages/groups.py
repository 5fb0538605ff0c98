"""Queue groups whose members leave or share, and calls whose members have left: what would be lost in silence."""

from __future__ import annotations

from proofs.sabotages.sabotage import Sabotage

MACHINES = ("tests/protocol/test_leaving_groups.py",)
LEAVES = ("tests/integration/test_group_leaves.py",)
SHARING = ("tests/protocol/test_sharing.py",)
TOGETHER = ("tests/integration/test_group_sharing.py",)
LOST = ("tests/protocol/test_lost_members.py",)

SABOTAGES = (
    Sabotage(
        "leaver-gets-nothing",
        "relay/core/casts.py",
        "Casts._subscribers",
        "self._apart(route, leaving.get(group, ()))[0]",
        "[]",
        MACHINES,
        "what is on its way to the last member of a group at its relay is lost",
    ),
    Sabotage(
        "leaver-not-waited-for",
        "relay/core/parts.py",
        "Parts.end_subscription",
        "(room and bool(last) and not self.alone)",
        "False",
        MACHINES,
        "a member is told that nothing more comes while other relays still send to it",
    ),
    Sabotage(
        "leaver-without-bound",
        "relay/core/parts.py",
        "Parts.end_subscription",
        "session.leaving < MAX_LEAVING",
        "True",
        MACHINES,
        "one session lets the relay keep any number of subscriptions that are being left",
    ),
    Sabotage(
        "leaver-cut-by-bye",
        "relay/core/control.py",
        "SessionControl._end_groups",
        "[each for each in session.subscriptions if each[1]]",
        "list[tuple[str, str]]()",
        MACHINES,
        "a client that closes loses what is on its way to its groups",
    ),
    Sabotage(
        "leaver-of-a-stopping-relay",
        "relay/core/parts.py",
        "Parts.known",
        "self.drains if self.drains.begun else self.settling",
        "self.settling",
        MACHINES,
        "what sessions of a relay that stops send before they know of it is lost",
    ),
    Sabotage(
        "client-leaves-at-once",
        "iris/registry.py",
        "Registry.remove",
        "answer is not None and subscription.group",
        "False",
        LEAVES,
        "a client drops what its relay sent to a group before the relay knew that it leaves",
    ),
    Sabotage(
        "unread-share-untold",
        "iris/subscription.py",
        "Subscription._drop_unread",
        "not self.group",
        "True",
        LEAVES,
        "a member that leaves its loop loses its share of a group in silence",
    ),
    Sabotage(
        "first-burst-whole",
        "iris/core/outbound.py",
        "Outbound.flow",
        "kind == Kind.PUBLISH",
        "False",
        SHARING,
        "the first burst of each publisher goes to one member of a group",
    ),
    Sabotage(
        "share-of-the-first",
        "iris/registry.py",
        "Registry.sinks",
        "len(each) == 1",
        "True",
        TOGETHER,
        "one of several subscriptions of a group in one client gets all of its messages",
    ),
    Sabotage(
        "absent-members-given-up",
        "iris/core/requests.py",
        "Requests._pauses",
        "fail.seen_ms < SEEN_MS",
        "False",
        LOST,
        "an idempotent request fails although its members are only away",
    ),
    Sabotage(
        "absent-members-for-everybody",
        "iris/core/requests.py",
        "Requests._pauses",
        "not pending.idempotent",
        "False",
        LOST,
        "a call that must not run twice is sent again",
    ),
)
