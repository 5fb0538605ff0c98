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
from itertools import accumulate, count, pairwise

import uvloop
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

# length of what follows, kind, flags, alias, hop id, deadline, first counter, count; then authenticated: send
# time, timeout
HEAD, END = struct.Struct("<IBBIQqQIqI"), struct.Struct("<qI")
NONCE, U32, U64 = struct.Struct("<4xQ"), struct.Struct("<I"), struct.Struct("<Q")
KIND_AT, ALIAS_AT, HOP_AT, END_AT, REQUEST, REPLY, RUN, MIB = 4, 6, 10, 38, 1, 2, 32, 1 << 20
CIPHER, AAD = AESGCM(bytes(32)), b"constant: kind, name, key id, sender id"
BACK_CIPHER, BACK_AAD, COUNTER = AESGCM(b"1" * 32), AAD + b"request's sender id", [0]
NUMBER = count()
VIEW = memoryview(BUFFER := bytearray(256 * 1024))  # the only receive buffer of the process
LOOP, OPTIONS = uvloop.new_event_loop(), json.loads(sys.argv[2])


# A run's frame: head, u32 length of each body, bodies.
def written(kind, alias, hop, deadline, counter, end, bodies):
    data = b"".join((struct.pack(f"<{len(bodies)}I", *map(len, bodies)), *bodies))
    size, n = HEAD.size - 4 + len(data), len(bodies)
    return HEAD.pack(size, kind, 0, alias, hop, deadline, counter, n, *end) + data


def read(at):
    head, end = HEAD.unpack_from(BUFFER, at), VIEW[at + END_AT : at + HEAD.size]
    lengths = struct.unpack_from(f"<{head[7]}I", BUFFER, at + HEAD.size)
    begins = [*accumulate(lengths, initial=at + HEAD.size + 4 * len(lengths))]
    return head, end, [VIEW[a:b] for a, b in pairwise(begins)]


async def stop():
    LOOP.add_signal_handler(signal.SIGTERM, (stopped := LOOP.create_future()).set_result, {})
    print("ready", flush=True)
    return await stopped


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
    libc, members, pending, hops = ctypes.CDLL(None), [], {}, count(1)
    _ = libc.mallopt(-3, 64 * MIB), libc.mallopt(-1, 512 * MIB)  # mmap and trim thresholds

    def forward(port, starts, end):
        for at, after in pairwise((*starts, end)):
            (hop,) = U64.unpack_from(BUFFER, at + HOP_AT)
            if BUFFER[at + KIND_AT] == REQUEST:
                receiver, out = members[U32.unpack_from(BUFFER, at + ALIAS_AT)[0]], next(hops)
                pending[out] = port, hop
            else:
                receiver, out = pending.pop(hop)
            U64.pack_into(BUFFER, at + HOP_AT, out)
            receiver.transport.write(VIEW[at:after].tobytes())

    _ = [  # the loop does not keep its servers
        await LOOP.create_unix_server(lambda: Port(forward, members.append), path + ".member"),
        await LOOP.create_unix_server(lambda: Port(forward), path + ".client"),
    ]
    return await stop()


async def server(path, **_):
    def serve(port, starts, end):
        for at in starts:
            (_, _, _, alias, hop, deadline, first, n, _, timeout), end, bodies = read(at)
            aad, own, sent = AAD + end, COUNTER[0], (time.monotonic_ns(), timeout)
            back, replies = BACK_AAD + END.pack(*sent), []
            for i, body in enumerate(bodies):
                payload = CIPHER.decrypt(NONCE.pack(first + i), body, aad)
                bound = back + NONCE.pack(first + i)  # the reply to its request
                replies.append(BACK_CIPHER.encrypt(NONCE.pack(own + i), payload, bound))
            COUNTER[0] += n
            port.transport.write(written(REPLY, alias, hop, deadline, own, sent, replies))

    await LOOP.create_unix_connection(lambda: Port(serve), path + ".member")
    return await stop()


async def client(path, size, seconds, inflight, **_):
    waiting, turn, filler, samples_ns, wrong = {}, [], bytes(size - 8), [], 0
    run, aad = (), b""

    def replies(port, starts, end):
        for at in starts:
            (_, _, _, _, hop, _, counter, *_), end, bodies = read(at)
            for i, body in enumerate(bodies):  # a run's hop id is its first counter here
                bound, nonce = BACK_AAD + end + NONCE.pack(hop + i), NONCE.pack(counter + i)
                waiting.pop(hop + i).set_result(BACK_CIPHER.decrypt(nonce, body, bound))

    def flush():
        if turn:
            port.transport.write(written(REQUEST, 0, *run, turn))
            turn.clear()

    def request(payload, timeout_ms):
        nonlocal run, aad
        own = COUNTER[0]
        if not turn:
            now_ns = time.monotonic_ns()
            run = own, now_ns + timeout_ms * 1_000_000, own, (now_ns, timeout_ms)
            aad = AAD + END.pack(*run[-1])
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


signal.alarm(90)  # ends this role even if the bench is killed
result = LOOP.run_until_complete(globals()[sys.argv[1]](**OPTIONS))
peak_kib = int(open("/proc/self/status").read().partition("VmHWM:")[2].split()[0])  # noqa: SIM115
print(json.dumps({"cpu_s": time.process_time(), "peak_bytes": peak_kib * 1024, **result}))
