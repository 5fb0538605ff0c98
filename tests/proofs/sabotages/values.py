"""Names, values and handlers of programs: a mistake there raises, and costs nothing else."""

from __future__ import annotations

from proofs.sabotages.sabotage import Sabotage

NAMES = ("tests/integration/test_names.py",)

SABOTAGES = (
    Sabotage(
        "values-no-group",
        "iris/wire/names.py",
        "optional",
        'name is None or name == ""',
        "not name",
        NAMES,
        "False as a group subscribes without one, so that every worker gets every message",
    ),
    Sabotage(
        "values-no-uuid",
        "iris/wire/names.py",
        "check_uuid",
        'uuid is None or uuid == ""',
        "not uuid",
        NAMES,
        "delete(name, uuid=False) deletes whatever stream has the name",
    ),
    Sabotage(
        "values-own-frames",
        "iris/core/conversation.py",
        "Conversation.ask",
        "check_control(body)",
        "None",
        NAMES,
        "a malformed frame of one call ends the session of all services of the process",
    ),
)
