"""Handlers and iterators: whose context variables a handler sees, and what a wait that is cancelled leaves behind."""

from __future__ import annotations

from proofs.sabotages.sabotage import Sabotage

CONTEXTS = ("tests/integration/test_contexts.py",)
ITERATORS = ("tests/integration/test_iterators.py",)
CLOSING = ("tests/integration/test_closing.py",)

SABOTAGES = (
    Sabotage(
        "context-of-a-request",
        "iris/serving.py",
        "ServiceBinding.dispatch",
        "context.run(function, argument)",
        "function(argument)",
        CONTEXTS,
        "a plain function sees what the one before it has set",
    ),
    Sabotage(
        "context-of-a-broadcast",
        "iris/broadcasts.py",
        "Broadcasts.run",
        "context.run(handler.function, handler.convert(message))",
        "handler.function(handler.convert(message))",
        CONTEXTS,
        "a broadcast sees what the one before it has set",
    ),
    Sabotage(
        "context-of-a-publication",
        "iris/subscription.py",
        "Subscription._call",
        "run(handler, message)",
        "handler(message)",
        CONTEXTS,
        "a publication sees what the one before it has set",
    ),
    Sabotage(
        "context-used-again",
        "iris/subscription.py",
        "Subscription._call",
        "context != first",
        "False",
        CONTEXTS,
        "a publication sees what the one before it in its bundle has set",
    ),
    Sabotage(
        "context-not-compared",
        "iris/contexts.py",
        "Contexts.changed",
        "copy_context() != self._worker",
        "False",
        CONTEXTS,
        "a coroutine function sees what the one before it has set",
    ),
    Sabotage(
        "context-of-a-worker-kept",
        "iris/serving.py",
        "ServiceBinding._work",
        "contexts.sets and contexts.changed()",
        "False",
        CONTEXTS,
        "a worker without work holds what belonged to its first message",
    ),
    Sabotage(
        "context-of-a-loss",
        "iris/losses.py",
        "LossLog.report",
        "self._context.copy().run(on_loss, loss)",
        "on_loss(loss)",
        CONTEXTS,
        "a function for losses sees what others have set",
    ),
    Sabotage(
        "cancelled-request-forgotten",
        "iris/request_many.py",
        "Many._send_from",
        "self._again.appendleft(first)",
        "None",
        ITERATORS,
        "a wait for a relay that is cancelled loses the payload that was to be sent",
    ),
    Sabotage(
        "left-chunks-not-skipped",
        "iris/tunnel.py",
        "_Chunks._release",
        "self._started and not self._last",
        "False",
        ITERATORS,
        "the rest of a message whose chunks were left is taken for the next message",
    ),
    Sabotage(
        "dropped-iterator-kept",
        "iris/iterating.py",
        "Iteration.__del__",
        "not self._over and self._loop is not None",
        "False",
        ITERATORS,
        "an iterator that nobody has any more keeps its subscription, watch or requests",
    ),
    Sabotage(
        "closed-before-services",
        "iris/blocking.py",
        "Client._close",
        "leave.set()",
        "None",
        CLOSING,
        "a client that is closed waits for its own services",
    ),
    Sabotage(
        "handler-waits-for-itself",
        "iris/connection.py",
        "Connection.close",
        "self._runtime.runs_in(asyncio.current_task())",
        "False",
        CLOSING,
        "a handler that closes its client is cancelled after the time for draining, and its reply is lost",
    ),
)
