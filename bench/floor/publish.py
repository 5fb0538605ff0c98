"""Bare twin of publish: publisher -> blind relay -> subscribers; Iris's cut, buffers and cipher, nothing else.
Lossless: the relay stops reading the publisher while a subscriber has over 64 MiB unsent."""

import asyncio
import ctypes
import json
import signal
import struct
import sys
import time

import msgspec
import uvloop
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

# length of what follows, kind, flags, alias; then authenticated: counter, count, send time, first sequence
HEAD = struct.Struct("<IBBIQIqQ")
NONCE, U32, U64 = struct.Struct("<4xQ"), struct.Struct("<I"), struct.Struct("<Q")
ALIAS_AT, END_AT, DATA, MARKER, CUT_BYTES, TURN_MESSAGES, MIB = 6, 10, 1, 2, 66_560, 256, 1 << 20
CIPHER, AAD = AESGCM(bytes(32)), b"constant: kind, name, key id, sender id"
VIEW = memoryview(BUFFER := bytearray(256 * 1024))  # the only receive buffer of the process
Message = msgspec.defstruct("Message", [("payload", bytes), ("name", str)], gc=False)
LOOP, OPTIONS = uvloop.new_event_loop(), json.loads(sys.argv[2])


# Find whole frames in BUFFER and pass their offsets to `on_frames`; an incomplete one waits in `tail`.
class Port(asyncio.BufferedProtocol):
    def __init__(self, on_frames=None, made=id, high_bytes=MIB):
        self.on_frames, self.made, self.high_bytes, self.tail = on_frames, made, high_bytes, b""
        self.writable = asyncio.Event()
        self.pause_writing, self.resume_writing = self.writable.clear, self.writable.set
        self.writable.set()

    def connection_made(self, transport):
        self.transport = transport
        transport.set_write_buffer_limits(high=self.high_bytes)
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
        self.on_frames(starts, at)
        self.tail = VIEW[at:end].tobytes()


async def relay(path, topics, **_):
    libc, stop, ports, source = ctypes.CDLL(None), LOOP.create_future(), [], []
    _ = libc.mallopt(-3, 64 * MIB), libc.mallopt(-1, 512 * MIB)  # mmap and trim thresholds
    routes = [
        (ports, 7 + alias) for alias in range(topics)
    ]  # alias -> receivers, and the alias at each

    async def resume():
        await asyncio.gather(*(port.writable.wait() for port in ports))
        source[0].transport.resume_reading()

    def forward(starts, end):
        begin, run, read, write = 0, None, U32.unpack_from, U32.pack_into
        for at in [*starts, end]:
            receivers, alias = routes[read(BUFFER, at + ALIAS_AT)[0]] if at < end else (None, 0)
            if receivers is not run:  # a run, forwarded as one slice, ends where receivers change
                for port in run or ():
                    port.transport.write(VIEW[begin:at].tobytes())
                begin, run = at, receivers
            if run:
                write(BUFFER, at + ALIAS_AT, alias)
        if not all(port.writable.is_set() for port in ports):
            source[0].transport.pause_reading()
            LOOP.create_task(resume())

    LOOP.add_signal_handler(signal.SIGTERM, stop.set_result, {})
    _ = [  # the loop does not keep its servers
        await LOOP.create_unix_server(lambda: Port(None, ports.append, 64 * MIB), path + ".sub"),
        await LOOP.create_unix_server(lambda: Port(forward, source.append), path + ".pub"),
    ]
    print("ready", flush=True)
    return await stop


async def subscriber(path, topics, **_):
    done, received, wrong, expected = LOOP.create_future(), 0, 0, list(range(topics))
    names = [f"bench.{alias - 7}" for alias in range(topics + 7)]

    def on_message(message):
        nonlocal received, wrong
        (number,) = U64.unpack_from(message.payload)
        received, wrong = received + 1, wrong + (number != expected[number % topics])
        expected[number % topics] = number + topics

    def open_frames(starts, end):
        for at, after in zip(starts, [*starts[1:], end], strict=False):
            _, kind, _, alias, counter, count, _, _ = HEAD.unpack_from(BUFFER, at)
            if kind == MARKER:
                return done.set_result(time.monotonic_ns())
            body, aad = VIEW[at + HEAD.size : after], AAD + VIEW[at + END_AT : at + HEAD.size]
            plain, name = CIPHER.decrypt(NONCE.pack(counter), body, aad), names[alias]
            begin = base = (12 + 4 * count + 7) & ~7
            for offset in struct.unpack_from(f"<{count}i", plain, 12):
                on_message(Message(plain[begin : base + offset], name))
                begin = base + offset

    await LOOP.create_unix_connection(lambda: Port(open_frames), path + ".sub")
    print("ready", flush=True)
    return {"end_ns": await done, "received": received, "wrong": wrong}


async def publisher(path, topics, size, seconds, unbundled, **_):
    _, port = await LOOP.create_unix_connection(Port, path + ".pub")
    held, turn = {}, []  # alias -> offsets and payloads of its open bundle; frames of this turn
    counter, sequences, cut_bytes = 0, [0] * topics, 0 if unbundled else CUT_BYTES

    def publish(alias, payload):
        offsets, parts = held.get(alias) or held.setdefault(alias, ([0], [b""]))
        offsets.append(offsets[-1] + len(payload))
        parts.append(payload)
        if offsets[-1] >= cut_bytes:
            seal(alias, *held.pop(alias))

    def seal(alias, offsets, parts):
        nonlocal counter
        count, counter, first = len(offsets) - 1, counter + 1, sequences[alias]
        parts[0] = struct.pack(f"<II{count + 1}i{4 * (~count & 1)}x", count, 0, *offsets)
        plain, sequences[alias], now_ns = b"".join(parts), first + count, time.monotonic_ns()
        head = HEAD.pack(len(plain) + 50, DATA, 0, alias, counter, count, now_ns, first)
        turn.extend((head, CIPHER.encrypt(NONCE.pack(counter), plain, AAD + head[END_AT:])))

    filler, sent, begin_ns = bytes(size - 8), 0, time.monotonic_ns()
    while time.monotonic_ns() < begin_ns + seconds * 1e9:
        for number in range(sent, sent := sent + TURN_MESSAGES):
            publish(number % topics, U64.pack(number) + filler)
        for alias in list(held):
            seal(alias, *held.pop(alias))
        port.transport.writelines(turn)
        turn.clear()
        await asyncio.sleep(0)
        await port.writable.wait()
    port.transport.set_write_buffer_limits(0)  # from here writable means all is sent
    port.transport.write(HEAD.pack(HEAD.size - 4, MARKER, 0, 0, 0, 0, 0, 0))
    await port.writable.wait()
    return {"begin_ns": begin_ns, "sent": sent}


signal.alarm(90)  # ends this role even if the bench is killed
result = LOOP.run_until_complete(globals()[sys.argv[1]](**OPTIONS))
peak_kib = int(open("/proc/self/status").read().partition("VmHWM:")[2].split()[0])  # noqa: SIM115
print(json.dumps({"cpu_s": time.process_time(), "peak_bytes": peak_kib * 1024, **result}))
