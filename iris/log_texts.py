"""The sentences of the library's log events: of clients, services, `iris run` and Spark.

They are the messages of log records (`iris.logs`), with plain `logging` as with `--log-format text`. `{name}` stands
for the field `name`. A sentence says what happened, to what, why, and what to do if there is something to do. Events of
relays, stores and bridges have theirs in `relay.log_texts`.
"""

from __future__ import annotations

from typing import Final

_BUG: Final = "This is a bug in Iris: please report it with the traceback."

SENTENCES: Final[dict[str, str | tuple[str, ...]]] = {
    # Streams
    "stream.partition_away": "Partition {partition} of stream {stream} cannot be read now: {error}. The other partitions are read, and this one is tried again.",
    "stream.partition_back": "Partition {partition} of stream {stream} is read again.",
    "consumer.active": "This worker of consumer {consumer} of stream {stream} is active: it receives the messages.",
    "consumer.standing_by": "This worker of consumer {consumer} of stream {stream} stands by; workers before it: {before}.",
    "consumer.replaced": "Another worker of consumer {consumer} of stream {stream} has replaced this one, which was away for too long or was told to hand over. It stands by, and what it settles is refused.",
    # Programs: clients, services, iris run
    "client.connected": "The client is connected again after {away_s} s without a relay.",
    "client.disconnected": "The client lost its relay: {reason}. It looks for one again.",
    "client.reconnect": "The client could not connect: {error}. It tries again.",
    "client.relay_draining": "The relay is stopping. The client finishes there what is in flight and looks for another relay.",
    "client.loss": (
        "Messages were lost, and {held_back} more losses like it were not logged: {loss}.",
        "Messages were lost: {loss}.",
        "Subscription {subscription} missed at least {messages} messages (losses: {losses}, of unknown size: {unknown}), the last ones on topic {topic}: {cause}.",
        "Subscription {subscription} missed {messages} messages (losses: {losses}), the last ones on topic {topic}: {cause}.",
        "Subscription {subscription} missed an unknown number of messages (losses: {losses}, of unknown size: {unknown}), the last ones on topic {topic}: {cause}.",
        "Subscription {subscription} missed messages (losses: {losses}), the last ones on topic {topic}: {cause}.",
        "Service {service} missed at least {messages} messages (losses: {losses}, of unknown size: {unknown}), the last ones to {topic}: {cause}.",
        "Service {service} missed {messages} messages (losses: {losses}), the last ones to {topic}: {cause}.",
        "Service {service} missed an unknown number of messages (losses: {losses}, of unknown size: {unknown}), the last ones to {topic}: {cause}.",
        "Service {service} missed messages (losses: {losses}), the last ones to {topic}: {cause}.",
    ),
    "client.relay_stalled": "The relay has read nothing for {stall_s} s, so what is published to {topic} waits in this process: {waiting} bytes.",
    "client.publish_stalled": "A subscriber of {topic} made no room for {stall_s} s. Messages to it are dropped until it does.",
    "client.other_keys": "Nobody subscribes to {topic} under the key {key}, but under other keys ({others}). Publisher and subscriber need the same key: compare `iris key show`.",
    "client.handler_failed": (
        "{messages} message for {function} ({handler}) does not fit its parameter and was not handled: {error}; {held_back} more like it were not logged.",
        "{messages} message for {function} ({handler}) does not fit its parameter and was not handled: {error}.",
        "{function} ({handler}) raised {error}; {held_back} more like it were not logged. The service continues; correct the handler.",
        "{function} ({handler}) raised {error}. The service continues; correct the handler.",
    ),
    "client.handler_late": (
        "{function} ({handler}) was not done when its caller stopped waiting: {error}; {held_back} more like it were not logged. Give the caller a longer timeout, or find out what is slow.",
        "{function} ({handler}) was not done when its caller stopped waiting: {error}. Give the caller a longer timeout, or find out what is slow.",
    ),
    "client.handler_exited": "{function} ({handler}) raised {error}. The event loop of this program ends. If only the call should fail, raise another exception, such as iris.Refusal.",
    "client.context_shortened": "The headers of {messages} messages, the last one to {name}, had no room for all of the trace context ({fields} left out; headers take at most {limit} bytes). The messages were sent. Send smaller headers, or less baggage.",
    "client.fault": f"The client's connection was closed because of an internal error; it connects again. {_BUG}",
    "relay.socket_skipped": "The relay's socket {socket} was not used because it cannot be trusted: {reason}.",
    "tunnel.not_direct": "A tunnel stays with the relay because its socket pair could not be fetched: {error}.",
    "service.loop_held": "The handler {handler} of {cluster} held up the event loop for {ms} ms or more, so nothing else in this process ran. Make it a coroutine function that awaits, or give it threads: @service.on_request(threads=8).",
    "service.stuck": "The service stopped although handlers did not end when they were cancelled (number: {handlers}). Let handlers raise CancelledError instead of suppressing it.",
    "run.serving": "The services of {clusters} are running (pid {pid}).",
    "run.waiting_for_relay": "No relay can be used yet: {error}. The services start when there is one.",
    "run.workers_ready": "All workers serve (pids {workers}).",
    "run.worker_ended": "Worker {worker} ended with exit code {exit}. It is started again.",
    "run.worker_not_started": "Worker {worker} could not be started: {error}. It is tried again.",
    "run.waiting_for_change": "Worker {worker} starts again when a file changes.",
    "run.reloading": "Files changed ({changed}). The workers finish their work and start again.",
    "run.supervisor_stopping": "The {workers} workers are stopping.",
    "run.stopping": "The services of {clusters} are stopping.",
    "run.keys_reloaded": "The keyring was read again.",
    "run.keys_not_reloaded": "The keyring could not be read again, so the old keys stay in use: {error}. Correct it and send SIGHUP.",
    # Pages and bridges over HTTP
    "metrics.serving": "Metrics of this process are served at http://{address}/metrics.",
    "web.failed": (
        f"A request of {{path}} failed with an internal error and was answered with 500: {{error}}. {{held_back}} more like it were not logged. {_BUG}",
        f"A request of {{path}} failed with an internal error and was answered with 500: {{error}}. {_BUG}",
    ),
    "http.refused": (
        "A connection from {address} was cut or refused: {reason}. {held_back} more like it were not logged.",
        "A connection from {address} was cut or refused: {reason}.",
    ),
    "dashboard.changed": "The dashboard carried out {action} of the consumer {consumer} of stream {stream} for the token {user}.",
    "web.wrong_token": (
        "A request from {address} had an unknown token and was refused; {held_back} more from there were not logged.",
        "A request from {address} had an unknown token and was refused.",
    ),
    # Spark
    "spark.progress": "Batch {batch} of query {query} read {rows} rows in {batch_ms} ms.",
    "spark.retry": "A call to a store failed and is tried again ({left} tries left): {error}.",
    "spark.data_loss": (
        "Offsets {from} to {until} of stream {stream} were removed before they were read. Read faster, or keep the stream longer.",
        "Stream {stream} lacks messages: {what}.",
    ),
    "spark.unreadable": "Offset {offset} of stream {stream} was left out because it cannot be read: {cause}. Check the keyring.",
    "spark.batch_was_there": "Batch {batch} of writer {writer} was in stream {stream} already and was not written twice.",
    "spark.not_discarded": "Staged rows of stream {stream} could not be removed: {error}. The store deletes them when they expire.",
    "spark.listener_failed": "The lag of a query could not be reported ({what}): {error}. The query continues.",
}
