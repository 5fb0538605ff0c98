"""Bare twin of request: client -> blind relay -> server and back; Iris's buffers and cipher, nothing else.
The relay maps hop ids through a pending table; request and reply are sealed singly and what one turn of a loop
sends is written together. `bench/roundtrip.py` runs `request.py ROLE OPTIONS-AS-JSON`."""

import asyncio
import ctypes
import json
import signal
import struct
import sys
import time
from itertools import count

import uvloop
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

# length of what follows, kind, flags, alias, hop id, deadline; then authenticated: counter, send time, timeout
HEAD = struct.Struct("<IBBIQqQqI")
NONCE, U32, U64 = struct.Struct("<4xQ"), struct.Struct("<I"), struct.Struct("<Q")
KIND_AT, ALIAS_AT, HOP_AT, END_AT, REQUEST, REPLY, MIB = 4, 6, 10, 26, 1, 2, 1 << 20
CIPHER, AAD = AESGCM(bytes(32)), b"constant: kind, name, key id, sender id"
BACK_CIPHER, BACK_AAD, COUNTER = AESGCM(b"1" * 32), AAD + b"request's sender id", count()
NUMBER = count()
VIEW = memoryview(BUFFER := bytearray(256 * 1024))  # the one receive buffer of the process
LOOP, OPTIONS = uvloop.new_event_loop(), json.loads(sys.argv[2])


# Finds whole frames in BUFFER and gives their offsets to `on_frames`; a partial one waits in `tail`.
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
    libc, stop, members, pending, hops = ctypes.CDLL(None), LOOP.create_future(), [], {}, count(1)
    _ = libc.mallopt(-3, 64 * MIB), libc.mallopt(-1, 512 * MIB)  # mmap and trim thresholds

    def forward(port, starts, end):
        begin, run, read, write = 0, None, U64.unpack_from, U64.pack_into
        for at in starts:
            (hop,) = read(BUFFER, at + HOP_AT)
            if BUFFER[at + KIND_AT] == REQUEST:
                receiver, out = members[U32.unpack_from(BUFFER, at + ALIAS_AT)[0]], next(hops)
                pending[out] = port, hop
            else:
                receiver, out = pending.pop(hop)
            if (
                receiver is not run
            ):  # a run, forwarded as one slice, ends where the receiver changes
                if run:
                    run.transport.write(VIEW[begin:at].tobytes())
                begin, run = at, receiver
            write(BUFFER, at + HOP_AT, out)
        if run:
            run.transport.write(VIEW[begin:end].tobytes())

    LOOP.add_signal_handler(signal.SIGTERM, stop.set_result, {})
    await LOOP.create_unix_server(lambda: Port(forward, members.append), path + ".member")
    await LOOP.create_unix_server(lambda: Port(forward), path + ".client")
    print("ready", flush=True)
    return await stop


async def server(path, **_):
    def echo(payload):
        return payload

    def serve(port, starts, end):
        replies = []
        for at, after in zip(starts, [*starts[1:], end], strict=False):
            _, _, _, alias, hop, deadline, counter, _, timeout = HEAD.unpack_from(BUFFER, at)
            body, aad = VIEW[at + HEAD.size : after], AAD + VIEW[at + END_AT : at + HEAD.size]
            payload = echo(CIPHER.decrypt(NONCE.pack(counter), body, aad))
            own, now_ns, size = next(COUNTER), time.monotonic_ns(), len(payload) + HEAD.size + 12
            head = HEAD.pack(size, REPLY, 0, alias, hop, deadline, own, now_ns, timeout)
            aad = BACK_AAD + NONCE.pack(counter) + head[END_AT:]  # binds the reply to its request
            replies += head, BACK_CIPHER.encrypt(NONCE.pack(own), payload, aad)
        port.transport.writelines(replies)

    stop = LOOP.create_future()
    LOOP.add_signal_handler(signal.SIGTERM, stop.set_result, {})
    await LOOP.create_unix_connection(lambda: Port(serve), path + ".member")
    print("ready", flush=True)
    return await stop


async def client(path, size, seconds, inflight, **_):
    waiting, turn, filler, samples_ns, wrong = {}, [], bytes(size - 8), [], 0

    def replies(port, starts, end):
        for at, after in zip(starts, [*starts[1:], end], strict=False):
            _, _, _, _, hop, _, counter, _, _ = HEAD.unpack_from(BUFFER, at)
            body, end_fields = VIEW[at + HEAD.size : after], VIEW[at + END_AT : at + HEAD.size]
            aad = BACK_AAD + NONCE.pack(hop) + end_fields  # a client's hop id is its counter here
            waiting.pop(hop).set_result(BACK_CIPHER.decrypt(NONCE.pack(counter), body, aad))

    def flush():
        port.transport.writelines(turn)
        turn.clear()

    def request(payload, timeout_ms):
        own, now_ns, size = next(COUNTER), time.monotonic_ns(), len(payload) + HEAD.size + 12
        deadline_ns = now_ns + timeout_ms * 1_000_000
        head = HEAD.pack(size, REQUEST, 0, 0, own, deadline_ns, own, now_ns, timeout_ms)
        if not turn:
            LOOP.call_soon(flush)
        turn.extend((head, CIPHER.encrypt(NONCE.pack(own), payload, AAD + head[END_AT:])))
        waiting[own] = future = LOOP.create_future()
        return future

    async def work(end_ns, record):
        nonlocal wrong
        while (begin_ns := time.perf_counter_ns()) < end_ns:
            payload = U64.pack(next(NUMBER)) + filler
            wrong += await request(payload, 5_000) != payload
            record(time.perf_counter_ns() - begin_ns)

    _, port = await LOOP.create_unix_connection(lambda: Port(replies), path + ".client")
    await work(time.perf_counter_ns() + 100_000_000, id)  # warm
    begin_ns = time.perf_counter_ns()
    end_ns = begin_ns + int(seconds * 1e9)
    await asyncio.gather(*(work(end_ns, samples_ns.append) for _ in range(inflight)))
    spent_s = (time.perf_counter_ns() - begin_ns) / 1e9
    return {"samples_ns": samples_ns, "spent_s": spent_s, "wrong": wrong}


signal.alarm(90)  # no role outlives this
result = LOOP.run_until_complete(globals()[sys.argv[1]](**OPTIONS))
peak_kib = int(open("/proc/self/status").read().partition("VmHWM:")[2].split()[0])  # noqa: SIM115
print(json.dumps({"cpu_s": time.process_time(), "peak_bytes": peak_kib * 1024, **result}))
