"""Bare twin of a direct tunnel: sender -> receiver in sealed records over one Unix socket; nothing else.
Messages are cut into chunks, these packed into records of at most 65,535 bytes; the socket alone holds the sender."""

import json
import signal
import socket
import struct
import sys
import time

import uvloop
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

CHUNK, NONCE, U32, U64 = (
    struct.Struct("<BI"),
    struct.Struct("<4xQ"),
    struct.Struct("<I"),
    struct.Struct("<Q"),
)
FIRST, LAST, RECORD_BYTES, SNDBUF, WRITE_BYTES = 1, 2, 65_535 - 16, 208 << 10, 192 << 10
KEY, VIEW = AESGCM(bytes(32)), memoryview(bytearray(512 << 10))
LOOP, OPTIONS = uvloop.new_event_loop(), json.loads(sys.argv[2])


async def receiver(path, **_):
    stop, tail, records, received, wrong, end_ns, parts = LOOP.create_future(), b"", 0, 0, 0, 0, []
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(path)
    listener.listen()
    listener.setblocking(False)
    print("ready", flush=True)
    connection, _ = await LOOP.sock_accept(listener)

    def take(plain, at=0):
        nonlocal received, wrong, end_ns
        while at < len(plain):
            flags, size = CHUNK.unpack_from(plain, at)
            parts.append(memoryview(plain)[at + CHUNK.size : (at := at + CHUNK.size + size)])
            if flags & LAST:
                message = b"".join(parts)
                parts.clear()
                wrong += U64.unpack_from(message)[0] != received
                received, end_ns = received + 1, time.monotonic_ns()

    def readable(at=0):
        nonlocal tail, records
        VIEW[: len(tail)] = tail
        got = connection.recv_into(VIEW[len(tail) :])
        if not got:
            LOOP.remove_reader(connection)
            stop.set_result(None)
            return
        end = len(tail) + got
        while end - at >= 4 and (after := at + 4 + U32.unpack_from(VIEW, at)[0]) <= end:
            plain, records = (
                KEY.decrypt(NONCE.pack(records), VIEW[at + 4 : after], None),
                records + 1,
            )
            take(plain)
            at = after
        tail = VIEW[at:end].tobytes()

    LOOP.add_reader(connection, readable)
    await stop
    return {"received": received, "wrong": wrong, "end_ns": end_ns}


async def sender(path, size, seconds, sndbuf=0, **_):
    connection, records, record, held, out, waiting = socket.socket(socket.AF_UNIX), 0, [], 0, [], 0
    connection.connect(path)
    connection.setblocking(False)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, sndbuf or SNDBUF)

    def seal():
        nonlocal records, held, waiting
        body = KEY.encrypt(NONCE.pack(records), b"".join(record), None)
        out.extend((U32.pack(len(body)), body))
        records, held, waiting = records + 1, 0, waiting + len(body)
        record.clear()

    async def write():
        nonlocal waiting
        waiting = 0
        while out:
            try:
                sent = connection.sendmsg(out)
            except BlockingIOError:
                room = LOOP.create_future()
                LOOP.add_writer(connection, room.set_result, None)
                await room
                LOOP.remove_writer(connection)
                continue
            while out and sent >= len(out[0]):
                sent -= len(out.pop(0))
            if out:
                out[0] = memoryview(out[0])[sent:]

    filler, sent, begin_ns = bytes(size - 8), 0, time.monotonic_ns()
    while time.monotonic_ns() < begin_ns + seconds * 1e9:
        message, begin = memoryview(U64.pack(sent) + filler), 0
        sent += 1
        while begin < size:
            end = min(size, begin + RECORD_BYTES - held - CHUNK.size)
            flags = FIRST * (begin == 0) | LAST * (end == size)
            record.extend((CHUNK.pack(flags, end - begin), message[begin:end]))
            held, begin = held + end - begin + CHUNK.size, end
            if RECORD_BYTES - held <= CHUNK.size:
                seal()
        if waiting >= WRITE_BYTES:
            await write()
    if record:
        seal()
    await write()
    connection.shutdown(socket.SHUT_WR)
    return {"begin_ns": begin_ns, "sent": sent}


signal.alarm(90)  # ends this role even if the bench is killed
result = LOOP.run_until_complete(globals()[sys.argv[1]](**OPTIONS))
print(json.dumps({"cpu_s": time.process_time(), **result}))
