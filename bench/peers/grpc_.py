"""gRPC with its asyncio API: raw bytes (no protobuf), unary requests, and a client stream for the stream. Its own
poller thread passes completed calls to the event loop (uvloop, too). The replier or receiver is the server."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
from certificates import make_certificates

from peers import Peer, Requester, Sender, Took

SERVICE = "bench.Bench"


class GrpcRequester(Requester):
    def __init__(self, channel: grpc.aio.Channel) -> None:
        # Without serializers, messages are bytes.
        self._ask: grpc.aio.UnaryUnaryMultiCallable[bytes, bytes]
        self._ask = channel.unary_unary(f"/{SERVICE}/Echo")

    async def request(self, payload: bytes) -> bytes:
        reply: bytes = await self._ask(payload)
        return reply


class GrpcSender(Sender):
    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._channel = channel  # garbage collection would close it
        self._call: grpc.aio.StreamUnaryCall[bytes, bytes]
        self._call = channel.stream_unary(f"/{SERVICE}/Stream")()

    async def send(self, payload: bytes) -> None:
        await self._call.write(payload)  # returns when flow control has let it pass


class Grpc(Peer):
    name = "grpc"

    def __init__(self, setup: dict[str, Any]) -> None:
        super().__init__(setup)
        self._open: list[grpc.aio.Server] = []

    def prepare(self) -> None:
        self.choose_port("service")
        if self.secured:
            certificates = make_certificates(self.directory)
            for name in ("ca", "cert", "key"):
                self.setup[name] = str(getattr(certificates, name))

    async def replier(self) -> None:
        async def echo(payload: bytes, context: grpc.aio.ServicerContext[bytes, bytes]) -> bytes:
            return payload

        await self._serve("Echo", grpc.unary_unary_rpc_method_handler(echo))

    async def requester(self) -> Requester:
        return GrpcRequester(await self._connect())

    async def receiver(self, took: Took) -> None:
        async def take(
            payloads: AsyncIterator[bytes], context: grpc.aio.ServicerContext[bytes, bytes]
        ) -> bytes:
            async for payload in payloads:
                took(payload)
            return b""

        await self._serve("Stream", grpc.stream_unary_rpc_method_handler(take))

    async def sender(self) -> Sender:
        return GrpcSender(await self._connect())

    @property
    def _address(self) -> str:
        return f"127.0.0.1:{self.port('service')}"

    def _pem(self, name: str) -> bytes:
        return Path(self.setup[name]).read_bytes()

    async def _serve(self, method: str, handler: grpc.RpcMethodHandler[bytes, bytes]) -> None:
        server = grpc.aio.server()
        server.add_generic_rpc_handlers(
            [grpc.method_handlers_generic_handler(SERVICE, {method: handler})]
        )
        if self.secured:
            pair = self._pem("key"), self._pem("cert")
            server.add_secure_port(self._address, grpc.ssl_server_credentials([pair]))
        else:
            server.add_insecure_port(self._address)
        await server.start()
        self._open.append(server)

    async def _connect(self) -> grpc.aio.Channel:
        # Channels of one process to one address would share one connection.
        options = [("grpc.use_local_subchannel_pool", 1)]
        if self.secured:
            credentials = grpc.ssl_channel_credentials(self._pem("ca"))
            channel = grpc.aio.secure_channel(self._address, credentials, options)
        else:
            channel = grpc.aio.insecure_channel(self._address, options)
        await channel.channel_ready()
        return channel


PEER = Grpc
