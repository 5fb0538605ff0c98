"""A simulated WAN, which delays the loopback, and bare twins over it: `python bench/floor/wan.py ROLE
OPTIONS-AS-JSON`.

`proxy` forwards each connection, every byte `delay_s` after it arrived; a ring bounds the bytes under way. It uses
threads, because the timers of an event loop round to a millisecond. `echo` and `asker`: 256 B there and back, one
in flight. `sink` and `source`: one stream at full speed, plain or under TLS. Roles that listen print their port
first."""

import contextlib
import json
import signal
import socket
import ssl
import sys
import threading
import time
from collections import deque

RING_BYTES, READ_BYTES, CHUNK_BYTES, SLICE_NS = 32 << 20, 256 << 10, 64 << 10, 50_000_000
OPTIONS = json.loads(sys.argv[2])


def listen():
    listener = socket.create_server(("127.0.0.1", 0))
    print(listener.getsockname()[1], flush=True)
    return listener


def connect(port):
    connection = socket.create_connection(("127.0.0.1", port))
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return connection


class Way:
    """One direction of a connection: one thread reads into a ring, another writes the bytes that are due."""

    def __init__(self, source, target, delay_ns):
        self.source, self.target, self.delay_ns = source, target, delay_ns
        self.ring = memoryview(bytearray(RING_BYTES))
        self.read = self.written = 0  # since the start
        self.due, self.changed = (
            deque(),
            threading.Condition(),
        )  # (time, value of `read` at that time)
        for work in (self.reading, self.writing):
            threading.Thread(target=self.guarded, args=(work,), daemon=True).start()

    def guarded(self, work):
        with contextlib.suppress(OSError):
            return work()
        for end in (self.source, self.target):  # when one side has closed, close the other
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def reading(self):
        got = 1
        while got:
            with self.changed:
                self.changed.wait_for(lambda: self.read - self.written < RING_BYTES)
                free = RING_BYTES - self.read + self.written
            at = self.read % RING_BYTES
            got = self.source.recv_into(self.ring[at : min(at + min(free, READ_BYTES), RING_BYTES)])
            with self.changed:
                self.read += got
                self.due.append((time.monotonic_ns() + self.delay_ns, self.read))
                self.changed.notify_all()

    def writing(self):
        while True:
            with self.changed:
                self.changed.wait_for(lambda: self.due)
            pause_ns = self.due[0][0] - time.monotonic_ns()
            if pause_ns > 0:
                time.sleep(pause_ns / 1e9)
            now_ns, end = time.monotonic_ns(), self.written
            while self.due and self.due[0][0] <= now_ns and self.due[0][1] > end:
                end = self.due.popleft()[1]
            if end == self.written:  # the end of the input
                self.target.shutdown(socket.SHUT_WR)
                return
            while self.written < end:
                at = self.written % RING_BYTES
                sent = self.target.send(self.ring[at : min(at + end - self.written, RING_BYTES)])
                with self.changed:
                    self.written += sent
                    self.changed.notify_all()


def proxy(port, delay_s, **_):
    listener, delay_ns, ways = listen(), int(delay_s * 1e9), []
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    while True:
        here = listener.accept()[0]
        here.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        there = connect(port)
        ways += [Way(here, there, delay_ns), Way(there, here, delay_ns)]


def echo(**_):
    connection = listen().accept()[0]
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    while data := connection.recv(READ_BYTES):
        connection.sendall(data)
    return {}


def asker(port, size, seconds, **_):
    connection, samples_ns, wrong = connect(port), [], 0
    end_ns = time.perf_counter_ns() + int(seconds * 1e9)
    while (begin_ns := time.perf_counter_ns()) < end_ns:
        message = len(samples_ns).to_bytes(8, "little") + bytes(size - 8)
        connection.sendall(message)
        wrong += connection.recv(size, socket.MSG_WAITALL) != message
        samples_ns.append(time.perf_counter_ns() - begin_ns)
    return {"samples_ns": samples_ns, "spent_s": seconds, "wrong": wrong}


def sink(cert, key, tls, **_):
    connection, buffer = listen().accept()[0], bytearray(1 << 20)
    received, slices, begin_ns = 0, [], 0
    if tls:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(cert, key)
        connection = context.wrap_socket(connection, server_side=True)
    while got := connection.recv_into(buffer):
        end_ns = time.monotonic_ns()
        begin_ns = begin_ns or end_ns
        received += got
        while len(slices) <= (end_ns - begin_ns) // SLICE_NS:
            slices.append(0)
        slices[-1] += got
    return {"received": received, "end_ns": end_ns, "slices": slices}


def source(port, ca, tls, seconds, **_):
    connection, sent, chunk = connect(port), 0, bytes(CHUNK_BYTES)
    if tls:
        context = ssl.create_default_context(cafile=ca)
        connection = context.wrap_socket(connection, server_hostname="127.0.0.1")
    begin_ns = time.monotonic_ns()
    while time.monotonic_ns() < begin_ns + seconds * 1e9:
        connection.sendall(chunk)
        sent += CHUNK_BYTES
    connection.shutdown(socket.SHUT_WR)
    # Wait until the sink has read everything; under TLS, its session tickets arrive first.
    while connection.recv(READ_BYTES):
        pass
    return {"begin_ns": begin_ns, "sent": sent}


signal.alarm(200)  # ends this role even if the bench is killed
result = globals()[sys.argv[1]](**OPTIONS)
print(json.dumps({"cpu_s": time.process_time(), **(result or {})}))
