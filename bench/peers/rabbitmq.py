"""RabbitMQ and aio-pika: transient messages, no confirms and no acknowledgements, a fanout exchange per topic and a
queue per subscriber; requests go to one queue, replies to a queue per requester. The server is Debian's package
with its defaults. Its port mapper (epmd) is started beside it; otherwise the server would start one that keeps
running."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import aio_pika
from aio_pika import abc
from certificates import make_certificates

from peers import TOPIC, Peer, Publisher, Requester, Server, Took

REQUESTS = "bench.echo"
COMMAND = Path("/usr/lib/rabbitmq/bin/rabbitmq-server")
"""The script that the command of this name runs, after changing to the user rabbitmq."""

ERLANG = "+B i -kernel inet_dist_use_interface {127,0,0,1}"
"""Erlang options: interrupts are left to the bench, and ports are not open to other hosts."""


def transient(payload: bytes, **properties: Any) -> aio_pika.Message:
    mode = aio_pika.DeliveryMode.NOT_PERSISTENT
    return aio_pika.Message(payload, delivery_mode=mode, **properties)


class RabbitPublisher(Publisher):
    def __init__(self, exchange: abc.AbstractExchange) -> None:
        self._exchange = exchange

    async def burst(self, payloads: Sequence[bytes]) -> None:
        publish = self._exchange.publish
        for payload in payloads:
            await publish(transient(payload), "", mandatory=False)


class RabbitRequester(Requester):
    def __init__(self, exchange: abc.AbstractExchange, reply_to: str) -> None:
        self._exchange = exchange
        self._reply_to = reply_to
        self._number = 0
        self._asked: dict[str | None, asyncio.Future[bytes]] = {}
        self._loop = asyncio.get_running_loop()

    async def request(self, payload: bytes) -> bytes:
        self._number += 1
        name = str(self._number)
        answer: asyncio.Future[bytes] = self._loop.create_future()
        self._asked[name] = answer
        message = transient(payload, correlation_id=name, reply_to=self._reply_to)
        await self._exchange.publish(message, REQUESTS, mandatory=False)
        return await answer

    async def answered(self, message: abc.AbstractIncomingMessage) -> None:
        self._asked.pop(message.correlation_id).set_result(message.body)


class RabbitMQ(Peer):
    name = "rabbitmq"
    needs: ClassVar[Sequence[str]] = ("rabbitmq-server",)

    def __init__(self, setup: dict[str, Any]) -> None:
        super().__init__(setup)
        self._open: list[abc.AbstractConnection] = []

    def prepare(self) -> None:
        for port in ("server", "epmd", "distribution"):
            self.choose_port(port)
        listener = f"127.0.0.1:{self.port('server')}"
        lines = [f"listeners.tcp.1 = {listener}"]
        if self.secured:
            certificates = make_certificates(self.directory)
            self.setup["ca"] = str(certificates.ca)
            lines = [
                "listeners.tcp = none",
                f"listeners.ssl.1 = {listener}",
                f"ssl_options.certfile = {certificates.cert}",
                f"ssl_options.keyfile = {certificates.key}",
            ]
        (self.directory / "rabbitmq.conf").write_text("\n".join(lines) + "\n")
        (self.directory / "plugins").write_text("[].\n")

    def servers(self) -> list[Server]:
        directory, epmd = str(self.directory), str(self.port("epmd"))
        mapper = {"ERL_EPMD_PORT": epmd, "ERL_EPMD_ADDRESS": "127.0.0.1"}
        env = {
            "HOME": directory,
            "RABBITMQ_CONFIG_FILE": f"{directory}/rabbitmq.conf",
            "RABBITMQ_DIST_PORT": str(self.port("distribution")),
            "RABBITMQ_ENABLED_PLUGINS_FILE": f"{directory}/plugins",
            "RABBITMQ_LOGS": "-",
            "RABBITMQ_LOG_BASE": directory,
            "RABBITMQ_MNESIA_BASE": directory,
            "RABBITMQ_NODENAME": "bench@127.0.0.1",
            "RABBITMQ_SERVER_ADDITIONAL_ERL_ARGS": ERLANG,
            "RABBITMQ_USE_LONGNAME": "true",
            # The script then replaces itself with the server, so that signals reach the server.
            "RUNNING_UNDER_SYSTEMD": "true",
        }
        command = str(COMMAND) if COMMAND.exists() else "rabbitmq-server"
        return [
            Server("epmd", ["epmd"], ("127.0.0.1", self.port("epmd")), mapper),
            Server("rabbitmq", [command], ("127.0.0.1", self.port("server")), mapper | env),
        ]

    async def publisher(self, topic: str = TOPIC) -> Publisher:
        channel = await self._channel()
        return RabbitPublisher(await self._fanout(channel, topic))

    async def subscriber(self, took: Took, topic: str = TOPIC) -> None:
        async def take(message: abc.AbstractIncomingMessage) -> None:
            took(message.body)

        channel = await self._channel()
        queue = await channel.declare_queue(exclusive=True, auto_delete=True)
        await queue.bind(await self._fanout(channel, topic))
        await queue.consume(take, no_ack=True)

    async def replier(self) -> None:
        channel = await self._channel()
        exchange = channel.default_exchange

        async def echo(message: abc.AbstractIncomingMessage) -> None:
            reply = transient(message.body, correlation_id=message.correlation_id)
            await exchange.publish(reply, message.reply_to or "", mandatory=False)

        queue = await channel.declare_queue(REQUESTS, auto_delete=True)
        await queue.consume(echo, no_ack=True)

    async def requester(self) -> Requester:
        channel = await self._channel()
        queue = await channel.declare_queue(exclusive=True, auto_delete=True)
        requester = RabbitRequester(channel.default_exchange, queue.name)
        await queue.consume(requester.answered, no_ack=True)
        return requester

    async def _channel(self) -> abc.AbstractChannel:
        """Open a new connection."""
        context = ssl.create_default_context(cafile=self.setup["ca"]) if self.secured else None
        scheme = "amqps" if self.secured else "amqp"
        url = f"{scheme}://guest:guest@127.0.0.1:{self.port('server')}/"
        connection = await aio_pika.connect(url, ssl_context=context)
        self._open.append(connection)  # garbage collection would close it
        return await connection.channel(publisher_confirms=False)

    async def _fanout(self, channel: abc.AbstractChannel, topic: str) -> abc.AbstractExchange:
        return await channel.declare_exchange(topic, aio_pika.ExchangeType.FANOUT)


PEER = RabbitMQ
