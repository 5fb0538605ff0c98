"""Processes that fork, and processes that end: who has a connection, and whose it is."""

from __future__ import annotations

from proofs.sabotages.sabotage import Sabotage

FORK = ("tests/integration/test_fork.py",)
BLOCKING = ("tests/integration/test_fork_blocking.py",)
DEAD = ("tests/integration/test_dead_processes.py",)

SABOTAGES = (
    Sabotage(
        "fork-sockets",
        "iris/forks.py",
        "_let_go",
        "os.dup2(blank, number, inheritable=False)",
        "None",
        BLOCKING,
        "a child of a fork has its parent's connections, can make the parent deaf to them, and keeps them open when it is killed",
    ),
    Sabotage(
        "fork-tls-sockets",
        "iris/dialling.py",
        "_connect_tcp",
        "keep_from_child(socket.socket(family, kind, protocol))",
        "socket.socket(family, kind, protocol)",
        BLOCKING,
        "a child of a fork has its parent's connection to a remote relay",
    ),
    Sabotage(
        "fork-pairs",
        "iris/pairs.py",
        "_stream_socket",
        "keep_from_child(socket.socket(fileno=descriptor))",
        "socket.socket(fileno=descriptor)",
        BLOCKING,
        "a child of a fork has its parent's end of a direct tunnel",
    ),
    Sabotage(
        "fork-blocking",
        "iris/blocking.py",
        "Client._forked",
        "not self._unusable",
        "False",
        BLOCKING,
        "a call of a blocking client waits for ever in the child of a fork",
    ),
    Sabotage(
        "fork-futures",
        "iris/blocking.py",
        "Client._forked",
        'future.set_exception(Closed(f"this client {_FORKED}"))',
        "None",
        BLOCKING,
        "a future of a blocking client waits for ever in the child of a fork",
    ),
    Sabotage(
        "fork-subscription",
        "iris/subscription.py",
        "Subscription._forked",
        "self._queue.clear()",
        "None",
        FORK,
        "the child of a fork handles messages that its parent handles, too",
    ),
    Sabotage(
        "fork-bundle",
        "iris/subscription.py",
        "Subscription._forked",
        "self._current",
        "()",
        FORK,
        "the child of a fork handles the rest of a bundle that its parent handles, too",
    ),
    Sabotage(
        "fork-consumer",
        "iris/streams/consuming.py",
        "Consumer._forked",
        "self._ready.clear()",
        "None",
        FORK,
        "the child of a fork handles jobs that its parent handles, too",
    ),
    Sabotage(
        "process-watched",
        "relay/net/sessions.py",
        "SessionHub._accepted",
        "peer_process(connection, peer.pid)",
        "None",
        DEAD,
        "a member that was killed stays listed while a process that it forked lives, and what is sent to it is lost",
    ),
    Sabotage(
        "process-written",
        "relay/net/sessions.py",
        "SessionPort._process_ended",
        "end_connection(connection)",
        'not self.abort("its process has ended")',
        DEAD,
        "what a process wrote before it was killed is lost without a report",
    ),
    Sabotage(
        "process-descriptor",
        "relay/net/sessions.py",
        "SessionPort._end",
        "self.unwatch()",
        "None",
        DEAD,
        "each session that ends leaves a descriptor in the relay, until none is free",
    ),
    Sabotage(
        "process-descriptors-fit",
        "relay/net/sessions.py",
        "SessionHub.__init__",
        "each=2",
        "each=1",
        (
            "tests/adversity/test_silence_and_floods.py::test_a_relay_with_few_descriptors_admits_as_many_sessions_as_fit",
        ),
        "the processes of sessions take the descriptors that links and files need",
    ),
)
