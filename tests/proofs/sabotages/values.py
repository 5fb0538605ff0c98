"""Names, values and handlers of programs: a mistake there raises, and costs nothing else."""

from __future__ import annotations

from proofs.sabotages.sabotage import Sabotage

NAMES = ("tests/integration/test_names.py",)
AWAITED = ("tests/integration/test_awaited_handlers.py",)
SETTLING = ("tests/integration/test_settling.py",)

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
    Sabotage(
        "values-own-log",
        "iris/streams/worker.py",
        "Worker.check_own",
        "message.uuid != self._uuid",
        "False",
        SETTLING,
        "an ack of another stream's message settles the one at its offset, which is never processed",
    ),
    Sabotage(
        "values-own-consumer",
        "iris/streams/worker.py",
        "Worker.check_own",
        'message.consumer not in ("", self._settings.name)',
        "False",
        SETTLING,
        "an ack of what another consumer delivered settles a message that this one has not processed",
    ),
    Sabotage(
        "values-all-own",
        "iris/streams/consuming.py",
        "Consumer._each",
        "check_own(some)",
        "check_own(())",
        SETTLING,
        "an ack of another stream's message settles the one at its offset in the same partition",
    ),
    Sabotage(
        "values-awaited-1",
        "iris/serving.py",
        "ServiceBinding.dispatch",
        "is_late(value)",
        "False",
        AWAITED,
        "a push to a lambda around a coroutine function runs nothing, and nobody sees that",
    ),
    Sabotage(
        "values-awaited-2",
        "iris/broadcasts.py",
        "Broadcasts.run",
        "is_late(value)",
        "False",
        AWAITED,
        "a broadcast to a plain function around a coroutine function runs nothing",
    ),
    Sabotage(
        "values-awaited-3",
        "iris/subscription.py",
        "Subscription._call",
        "is_late(value)",
        "False",
        AWAITED,
        "a publication to a plain function around a coroutine function runs nothing",
    ),
    Sabotage(
        "values-awaited-4",
        "iris/awaiting.py",
        "finished",
        "not inspect.isawaitable(value)",
        "inspect.isawaitable(value) and False",
        AWAITED,
        "a generator that a handler returns is not reported",
    ),
    Sabotage(
        "values-awaited-5",
        "iris/awaiting.py",
        "check_function",
        "inspect.isgeneratorfunction(code) or inspect.isasyncgenfunction(code)",
        "False",
        AWAITED,
        "a generator function is registered, and its body never runs",
    ),
)
