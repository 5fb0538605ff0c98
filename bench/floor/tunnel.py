"""Bare twin of a tunnel: sender -> blind relay -> receiver in sealed records, credit back; nothing else.
Messages are cut into chunks, these packed into records of at most 65,535 bytes; the receiver gives credit."""

import asyncio
import ctypes
import json
import signal
import struct
import sys
import time

import uvloop
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

HEAD, HOP_AT = (
    struct.Struct("<IBBIQq"),
    10,
)  # length of the rest, kind, flags, alias, hop id, deadline
CHUNK, NONCE = struct.Struct("<BI"), struct.Struct("<4xQ")  # flags, length; counter
U32, U64, TUNNEL, FIRST, LAST, CREDIT = struct.Struct("<I"), struct.Struct("<Q"), 3, 1, 2, 4
RECORD_BYTES, WINDOW_BYTES, TURN_MESSAGES, MIB = 65_535 - 16, 16 << 20, 16, 1 << 20
THERE, BACK = AESGCM(bytes(32)), AESGCM(b"1" * 32)
VIEW = memoryview(BUFFER := bytearray(256 * 1024))  # the only receive buffer of the process
LOOP, OPTIONS = uvloop.new_event_loop(), json.loads(sys.argv[2])


# Find whole frames in BUFFER and pass their offsets to `on_frames`; an incomplete one waits in `tail`.
class Port(asyncio.BufferedProtocol):
    def __init__(self, on_frames, made=id):
        self.on_frames, self.made, self.tail = on_frames, made, b""

    def connection_made(self, transport):
        self.transport = transport
        transport.get_extra_info("socket").setsockopt(1, 7, OPTIONS["sndbuf"])  # SO_SNDBUF
        self.made(self)

    def get_buffer(self, sizehint):
        VIEW[: len(self.tail)] = self.tail
        return VIEW[len(self.tail) :]

    def buffer_updated(self, nbytes):
        at, end, starts, size_at = 0, len(self.tail) + nbytes, [], U32.unpack_from
        while end - at >= 4 and (after := at + 4 + size_at(BUFFER, at)[0]) <= end:
            starts.append(at)
            at = after
        self.on_frames(self, starts, at)
        self.tail = VIEW[at:end].tobytes()


async def relay(path, **_):
    libc, stop, senders, receivers = ctypes.CDLL(None), LOOP.create_future(), [], []
    _ = libc.mallopt(-3, 64 * MIB), libc.mallopt(-1, 512 * MIB)  # mmap and trim thresholds
    routes = {1: (receivers, 9), 9: (senders, 1)}  # hop id -> the other side, and the hop id there

    def forward(port, starts, end):
        begin, run, read, write = 0, None, U64.unpack_from, U64.pack_into
        for at in [*starts, end]:
            to, hop = routes[read(BUFFER, at + HOP_AT)[0]] if at < end else (None, 0)
            if to is not run:  # a run, forwarded as one slice, ends where the receiver changes
                if run:
                    run[0].transport.write(VIEW[begin:at].tobytes())
                begin, run = at, to
            if run:
                write(BUFFER, at + HOP_AT, hop)

    LOOP.add_signal_handler(signal.SIGTERM, stop.set_result, {})
    _ = [  # the loop does not keep its servers
        await LOOP.create_unix_server(lambda: Port(forward, senders.append), path + ".sender"),
        await LOOP.create_unix_server(lambda: Port(forward, receivers.append), path + ".receiver"),
    ]
    print("ready", flush=True)
    return await stop


async def receiver(path, **_):
    stop, records, credits, parts, received, wrong, end_ns = LOOP.create_future(), 0, 0, [], 0, 0, 0

    def on_message(message):
        nonlocal received, wrong, end_ns
        wrong += U64.unpack_from(message)[0] != received
        received, end_ns = received + 1, time.monotonic_ns()

    def open_frames(port, starts, end):
        nonlocal records, credits
        consumed = 0
        for at, after in zip(starts, [*starts[1:], end], strict=False):
            plain, begin = THERE.decrypt(NONCE.pack(records), VIEW[at + HEAD.size : after], None), 0
            records += 1
            while begin < len(plain):
                flags, size = CHUNK.unpack_from(plain, begin)
                parts.append(plain[begin + CHUNK.size : (begin := begin + CHUNK.size + size)])
                consumed += size
                if flags & LAST:
                    on_message(b"".join(parts))
                    parts.clear()
        body = BACK.encrypt(NONCE.pack(credits), CHUNK.pack(CREDIT, consumed), None)
        head, credits = HEAD.pack(HEAD.size - 4 + len(body), TUNNEL, 0, 0, 9, 0), credits + 1
        port.transport.writelines((head, body))

    LOOP.add_signal_handler(signal.SIGTERM, stop.set_result, None)
    await LOOP.create_unix_connection(lambda: Port(open_frames), path + ".receiver")
    print("ready", flush=True)
    await stop
    return {"received": received, "wrong": wrong, "end_ns": end_ns}


async def sender(path, size, seconds, **_):
    window, credits, records, record, held, credit = WINDOW_BYTES, 0, 0, [], 0, asyncio.Queue()

    def on_credit(port, starts, end):
        nonlocal credits
        for at, after in zip(starts, [*starts[1:], end], strict=False):
            plain = BACK.decrypt(NONCE.pack(credits), VIEW[at + HEAD.size : after], None)
            credit.put_nowait(CHUNK.unpack(plain)[1])
            credits += 1

    def seal():
        nonlocal records, held
        body = THERE.encrypt(NONCE.pack(records), b"".join(record), None)
        port.transport.writelines((HEAD.pack(HEAD.size - 4 + len(body), TUNNEL, 0, 0, 1, 0), body))
        records, held = records + 1, 0
        record.clear()

    def send(message, begin=0):
        nonlocal window, held
        while begin < size:
            end = min(size, begin + RECORD_BYTES - held - CHUNK.size)
            flags = FIRST * (begin == 0) | LAST * (end == size)
            record.extend((CHUNK.pack(flags, end - begin), message[begin:end]))
            window, held, begin = window - end + begin, held + end - begin + CHUNK.size, end
            if RECORD_BYTES - held <= CHUNK.size:
                seal()

    _, port = await LOOP.create_unix_connection(lambda: Port(on_credit), path + ".sender")
    filler, sent, begin_ns = bytes(size - 8), 0, time.monotonic_ns()
    while time.monotonic_ns() < begin_ns + seconds * 1e9:
        for number in range(sent, sent := sent + TURN_MESSAGES):
            send(memoryview(U64.pack(number) + filler))
        seal()
        await asyncio.sleep(0)
        while window < size * TURN_MESSAGES:
            window += await credit.get()
    while window < WINDOW_BYTES:  # until all is consumed
        window += await credit.get()
    return {"begin_ns": begin_ns, "sent": sent}


signal.alarm(90)  # ends this role even if the bench is killed
result = LOOP.run_until_complete(globals()[sys.argv[1]](**OPTIONS))
peak_kib = int(open("/proc/self/status").read().partition("VmHWM:")[2].split()[0])  # noqa: SIM115
print(json.dumps({"cpu_s": time.process_time(), "peak_bytes": peak_kib * 1024, **result}))
