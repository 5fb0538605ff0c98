"""Bare twin of request: client -> blind relay -> server and back; Iris's buffers and cipher, nothing else.
Requests and replies are sealed singly; what one turn of a loop sends, at most 32, is one frame, and the relay's pending
table has one entry for it. `bench/roundtrip.py` runs `request.py ROLE OPTIONS-AS-JSON`."""

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

# length of what follows, kind, flags, alias, hop id, deadline, first counter, count; then authenticated: send time, timeout
HEAD = struct.Struct("<IBBIQqQIqI")
NONCE, U32, U64 = struct.Struct("<4xQ"), struct.Struct("<I"), struct.Struct("<Q")
KIND_AT, ALIAS_AT, HOP_AT, END_AT, REQUEST, REPLY, RUN, MIB = 4, 6, 10, 38, 1, 2, 32, 1 << 20
CIPHER, AAD = AESGCM(bytes(32)), b"constant: kind, name, key id, sender id"
BACK_CIPHER, BACK_AAD, COUNTER = AESGCM(b"1" * 32), AAD + b"request's sender id", [0]
NUMBER = count()
VIEW = memoryview(BUFFER := bytearray(256 * 1024))  # the one receive buffer of the process
LOOP, OPTIONS = uvloop.new_event_loop(), json.loads(sys.argv[2])


# A run's frame: head, u32 length of each body, bodies.
def frame(kind, alias, hop, deadline, counter, end, bodies):
    table = struct.pack(f"<{len(bodies)}I", *map(len, bodies))
    data = b"".join((table, *bodies))
    size = HEAD.size + len(data)
    return HEAD.pack(size - 4, kind, 0, alias, hop, deadline, counter, len(bodies), *end) + data


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
        for at in starts:
            _, _, _, alias, hop, deadline, counter, n, _, timeout = HEAD.unpack_from(BUFFER, at)
            aad, first, own, bodies = AAD + VIEW[at + END_AT : at + HEAD.size], counter, COUNTER[0], []
            back, at = struct.pack("<qI", time.monotonic_ns(), timeout), at + HEAD.size
            lengths = struct.unpack_from(f"<{n}I", BUFFER, at)
            at += 4 * n
            for size in lengths:
                payload = echo(CIPHER.decrypt(NONCE.pack(counter), VIEW[at : at + size], aad))
                bound = BACK_AAD + NONCE.pack(counter) + back  # the reply to its request
                bodies.append(BACK_CIPHER.encrypt(NONCE.pack(own + len(bodies)), payload, bound))
                at, counter = at + size, counter + 1
            COUNTER[0] += n
            end_fields = struct.unpack("<qI", back)
            port.transport.write(frame(REPLY, alias, hop, deadline, own, end_fields, bodies))

    stop = LOOP.create_future()
    LOOP.add_signal_handler(signal.SIGTERM, stop.set_result, {})
    await LOOP.create_unix_connection(lambda: Port(serve), path + ".member")
    print("ready", flush=True)
    return await stop


async def client(path, size, seconds, inflight, **_):
    waiting, turn, filler, samples_ns, wrong = {}, [], bytes(size - 8), [], 0
    run, aad = (0, 0, (0, 0)), b""

    def replies(port, starts, end):
        for at in starts:
            _, _, _, _, hop, _, counter, n, _, _ = HEAD.unpack_from(BUFFER, at)
            end_fields, at = VIEW[at + END_AT : at + HEAD.size], at + HEAD.size
            lengths = struct.unpack_from(f"<{n}I", BUFFER, at)
            at += 4 * n
            for i, size in enumerate(lengths):  # a run's hop id is its first counter here
                aad = BACK_AAD + NONCE.pack(hop + i) + end_fields
                payload = BACK_CIPHER.decrypt(NONCE.pack(counter + i), VIEW[at : at + size], aad)
                waiting.pop(hop + i).set_result(payload)
                at += size

    def flush():
        if turn:
            first, deadline_ns, end = run
            port.transport.write(frame(REQUEST, 0, first, deadline_ns, first, end, turn))
            turn.clear()

    def request(payload, timeout_ms):
        nonlocal run, aad
        own = COUNTER[0]
        if not turn:
            now_ns = time.monotonic_ns()
            run = own, now_ns + timeout_ms * 1_000_000, (now_ns, timeout_ms)
            aad = AAD + struct.pack("<qI", now_ns, timeout_ms)
            LOOP.call_soon(flush)
        COUNTER[0] = own + 1
        turn.append(CIPHER.encrypt(NONCE.pack(own), payload, aad))
        if len(turn) == RUN:
            flush()
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
