"""A session that attacks its relay: any bytes, over a blocking socket, as fast as the relay reads.

    python tests/support/attacker.py OPTIONS        # JSON: attacks, processes, where, chunks, deadline_s

An attack is a generator. It prepares the session up to its first `yield`, and then yields bytes to send. Between two
`yield`s it may do more: one that only yields empty bytes can still expect answers. An attacker whose connection the
relay closes connects again and begins again.
"""

from __future__ import annotations

import ctypes
import json
import os
import select
import signal
import socket
import ssl
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any, Final, NoReturn, Self, TypeVar
from urllib.parse import urlsplit

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from iris.crypto.keys import ClusterKey
from iris.remote import certificate_hash, load_access
from iris.wire import frames
from iris.wire.codec import END, HOP, decode_control, encode_control
from iris.wire.frames import Control
from iris.wire.kinds import PROTOCOL_MINOR

PR_SET_PDEATHSIG: Final = 1
_libc = ctypes.CDLL(None)
C = TypeVar("C", bound=Control)
READ_BYTES: Final = 1 << 18
PATIENCE_S: Final = 30.0
PAUSE_MS: Final = 20
STALLS: Final = 10
"""Times `PAUSE_MS` after which the relay is taken not to read."""
TAIL_BYTES: Final = 512
"""Bytes of the end of what was received that are kept, for the reason in an ERROR or a close frame."""
UPGRADE: Final = (
    "GET / HTTP/1.1\r\nHost: {}\r\nUpgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Version: 13\r\n"
    "Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\nSec-WebSocket-Protocol: iris.1\r\n\r\n"
)
CONTINUATION, BINARY, PING = 0x00, 0x02, 0x09
FIN: Final = 0x80


class Closed(Exception):
    """The relay has closed the connection; the text is the reason that it gave."""


def web_frame(opcode: int, payload: bytes = b"", *, fin: bool = True) -> bytes:
    """Return a masked WebSocket frame, whose mask is zero."""
    size = len(payload)
    if size < 126:
        length = bytes([0x80 | size])
    elif size < 1 << 16:
        length = b"\xfe" + size.to_bytes(2, "big")
    else:
        length = b"\xff" + size.to_bytes(8, "big")
    return bytes([opcode | (FIN if fin else 0)]) + length + bytes(4) + payload


def data_frame(
    kind: int, body: bytes = bytes(32), *, alias: int = 0, hop: int = 0, flags: int = 0, deadline: int = 0,
    count: int = 1,
) -> bytes:  # fmt: skip
    """Return a data frame with end fields."""
    end = END.pack(0, 0, count, 0)
    return HOP.pack(22 + len(end) + len(body), kind, flags, alias, hop, deadline) + end + body


class Attacker:
    """One connection of an attacker, with its keys and the frames that it makes."""

    def __init__(self, where: dict[str, str], number: int) -> None:
        self.where = where
        self.number = number
        self.name = f"evil.n{number}"
        """A cluster or topic of this attacker alone."""
        self.key = ClusterKey(bytes([0xE0, number]) * 16)
        self.sender_id = os.urandom(16)
        self.welcome: frames.Welcome
        self.channel = b""
        """What proofs are bound to: the certificate of a session over TLS."""
        self.deaf = False
        """Whether it does not read what it is sent."""
        self.brief = False
        """Whether this is a test: it prepares little, and ends when it is deaf and the relay does not read, either."""
        self.others: list[Attacker] = []
        """Other connections of the same attack."""
        self.sent_bytes = 0
        self.reflect: Callable[[bytes], bytes] | None = None
        """Returns what to send for what was received."""
        self.keeps = True
        """Whether it keeps what it receives, for `expect`."""
        self._out = b""
        """What is to be sent because of `reflect`."""
        self._tail = b""
        self._buffer = bytearray()
        self._scratch = bytearray(READ_BYTES)
        self._web = False
        self._socket: socket.socket

    # -- connections -----------------------------------------------------------------------------------------

    def connect(self) -> Self:
        """Connect to the relay's Unix socket."""
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.setblocking(False)
        until_s = time.monotonic() + PATIENCE_S
        while not stopped():
            try:
                self._socket.connect(self.where["socket"])
                return self
            except BlockingIOError:  # more connections wait to be accepted than the system queues
                time.sleep(0.001)
            except OSError as err:
                self._socket.close()
                raise Closed(f"not connected: {err}") from err
            if time.monotonic() > until_s:
                raise Closed(f"not accepted within {PATIENCE_S:g} s")
        raise Stopped

    def connect_web(self, *, upgrade: bool = True) -> Self:
        """Connect to the port for browsers."""
        self._dial(self.where["web"])
        if upgrade:
            self.send(UPGRADE.format(urlsplit(self.where["web"]).netloc).encode())
            while b"\r\n\r\n" not in self._buffer:
                self._receive()
            self._buffer.clear()
        self._web = True
        return self

    def connect_tls(self, *, handshake: bool = True) -> Self:
        """Connect to the port for sessions of other hosts."""
        access = load_access(Path(self.where["access"]))
        self._dial(self.where["tls"])
        if not handshake:
            return self
        plain = self._socket
        plain.settimeout(PATIENCE_S)
        try:
            self._socket = access.context.wrap_socket(plain, server_hostname=access.server_name)
        except OSError as err:
            raise Closed(f"no handshake: {type(err).__name__}") from err
        self.channel = certificate_hash(self._socket.getpeercert(binary_form=True) or b"")
        self._socket.setblocking(False)
        return self

    def _dial(self, url: str) -> None:
        parts = urlsplit(url)
        assert parts.hostname
        assert parts.port
        try:
            self._socket = socket.create_connection((parts.hostname, parts.port), PATIENCE_S)
        except OSError as err:
            raise Closed(f"not connected: {err}") from err
        self._socket.setblocking(False)

    def reopen(self) -> Self:
        """Close the connection, and connect again."""
        self.close()
        self._buffer.clear()
        self.keeps = True
        return self.connect()

    def another(self) -> Attacker:
        """Return another connection with the same keys, which is closed with this one."""
        other = Attacker(self.where, self.number)
        other.brief = self.brief
        self.others.append(other)
        return other

    def close(self) -> None:
        """Close all connections of the attack."""
        for other in self.others:
            other.close()
        self.others.clear()
        if hasattr(self, "_socket"):
            self._socket.close()

    def many(self, count: int) -> int:
        """Return a number of things to prepare: `count`, or in a test some."""
        return max(2, count // 32) if self.brief else count

    # -- conversations ---------------------------------------------------------------------------------------

    def greet(self) -> Self:
        """Send HELLO, and return after WELCOME."""
        mono_us = 0 if self._socket.family == socket.AF_UNIX else time.monotonic_ns() // 1000
        self.say(frames.Hello(1, PROTOCOL_MINOR, "attacker", os.getpid(), mono_us))
        self.welcome = self.expect(frames.Welcome)
        return self

    def prove(self, *keys: ClusterKey) -> Self:
        """Prove keys; without any, the attacker's own."""
        self.say(*map(self.proof, keys or (self.key,)))
        return self

    def ready(self) -> Self:
        """Connect, greet and prove the attacker's key."""
        return self.connect().greet().prove()

    def proof(self, key: ClusterKey, number: int = 0) -> frames.Prove:
        """Return a PROVE that is valid in this session."""
        signature = key.sign_proof(
            relay_id=self.welcome.relay_id,
            session_id=self.welcome.session_id,
            challenge=self.welcome.challenge,
            channel=self.channel,
        )
        return frames.Prove(number, key.public_key, signature)

    def declare(self, alias: int, kind: int, name: str = "", **more: Any) -> frames.Declare:
        """Return a DECLARE under our key."""
        sender = more.pop("sender_id", self.sender_id)
        return frames.Declare(alias, kind, name or self.name, self.key.key_id, sender, **more)

    def join(self, kind: int, name: str = "", *, concurrency: int = 1 << 20, limit_bytes: int = 1 << 40, **more: Any) -> frames.Join:  # fmt: skip
        """Return a JOIN of a member for one kind."""
        serving = {kind: frames.Serving(concurrency, limit_bytes)}
        return frames.Join(1, name or self.name, [self.key.key_id], serving, **more)

    def say(self, *bodies: Control) -> None:
        """Send control frames."""
        data = b"".join(map(encode_control, bodies))
        self.send(web_frame(BINARY, data) if self._web else data)

    def expect(self, wanted: type[C]) -> C:
        """Return the next control frame of this type, and ignore frames before it."""
        until_s = time.monotonic() + PATIENCE_S
        while time.monotonic() < until_s:
            body = self._next(wanted)
            if isinstance(body, wanted):
                return body
        raise Closed(f"no {wanted.__name__} within {PATIENCE_S:g} s")

    def settle(self) -> None:
        """Return when the relay has handled everything that was sent. What was received before is dropped."""
        number = int.from_bytes(os.urandom(7), "little")
        wanted = encode_control(frames.Pong(number))
        for one in (self, *self.others):
            one.deaf = False
        self.keeps = True
        self.say(frames.Ping(number))
        until_s = time.monotonic() + PATIENCE_S
        while (at := self._buffer.find(wanted)) < 0:
            del self._buffer[: -len(wanted)]
            self._receive()
            if time.monotonic() > until_s:
                raise Closed(f"no PONG within {PATIENCE_S:g} s")
        del self._buffer[: at + len(wanted)]

    def end(self) -> None:
        """Wait until the relay closes the connection. Raises Closed, then or after a while."""
        until_s = time.monotonic() + PATIENCE_S
        while time.monotonic() < until_s:
            self._poll(b"")
            at = self._tail.rfind(b"\x88")
            whole = 0 <= at < len(self._tail) - 1 and len(self._tail) == at + 2 + self._tail[at + 1]
            if self._web and whole:
                self._closed()  # a close frame, which wants an answer

    def _next(self, wanted: type[Control]) -> Control | None:
        """Return the next frame if it is of this type, else None."""
        buffer = self._buffer
        if self._web:  # a relay's WebSocket frames are not masked
            while len(buffer) < 4:
                self._receive()
            if buffer[0] & 0x0F == 0x08:
                self._closed()
            del buffer[: 4 if buffer[1] == 126 else 2]
        while len(buffer) < 5 or len(buffer) < 4 + int.from_bytes(buffer[:4], "little"):
            self._receive()
        size = 4 + int.from_bytes(buffer[:4], "little")
        frame = bytes(buffer[:size])
        del buffer[:size]
        return decode_control(memoryview(frame), 0, size) if frame[4] == wanted.FRAME else None

    def _receive(self) -> None:
        """Receive more, and wait for it."""
        until_s = time.monotonic() + PATIENCE_S
        had = len(self._buffer)
        while len(self._buffer) == had:
            self._poll(b"")
            if stopped():
                raise Stopped
            if time.monotonic() > until_s:
                raise Closed(f"nothing was received within {PATIENCE_S:g} s")

    # -- sockets ---------------------------------------------------------------------------------------------

    def flood(self, data: bytes) -> None:
        """As `send`, and drop what comes meanwhile: nothing can be expected from now on, except by `settle`."""
        for one in (self, *self.others):
            one.keeps = False
        self.send(data)

    def send(self, data: bytes) -> None:
        """Send bytes as fast as the relay reads, and read meanwhile what it sends, unless `deaf`. Raises Closed."""
        view = memoryview(data)
        self.sent_bytes += len(view)
        stalls = 0
        while view:
            sent = self._poll(view)
            view = view[sent:]
            stalls = 0 if sent else stalls + 1
            if stopped() or (self.deaf and self.brief and stalls > STALLS):
                raise Stopped

    def pause(self) -> None:
        """Send nothing for a moment, and read."""
        until_s = time.monotonic() + PAUSE_MS / 1000
        while time.monotonic() < until_s:
            self._poll(b"")

    def _poll(self, view: bytes | memoryview) -> int:
        """Do what the sockets are ready for, after waiting for one; return how much of `view` was sent."""
        poll = select.poll()
        all_ = {one._socket.fileno(): one for one in (self, *self.others)}
        for number, one in all_.items():
            wants_out = bool(view) if one is self else bool(one._out)
            events = (select.POLLOUT if wants_out else 0) | (0 if one.deaf else select.POLLIN)
            if events:
                poll.register(number, events)
        sent = 0
        for number, events in poll.poll(PAUSE_MS):
            one = all_[number]
            if events & ~select.POLLOUT and not one.deaf:
                one._read()
            if events & select.POLLOUT:
                if one is self:
                    sent = self._write(view)
                else:
                    one._out = one._out[one._write(one._out) :]
        return sent

    def _write(self, view: bytes | memoryview) -> int:
        try:
            return self._socket.send(view)
        except (BlockingIOError, ssl.SSLWantWriteError, ssl.SSLWantReadError):
            return 0
        except OSError:
            self._closed()

    def _read(self) -> None:
        try:
            size = self._socket.recv_into(self._scratch)
        except (BlockingIOError, ssl.SSLWantReadError):
            return
        except OSError:
            self._closed()
        if not size:
            self._closed()
        view = memoryview(self._scratch)[:size]
        self._tail = (self._tail + bytes(view[-TAIL_BYTES:]))[-TAIL_BYTES:]
        if self.reflect is not None and not self.keeps:
            self._out += self.reflect(bytes(view))
        elif self.keeps:
            self._buffer += view

    def _closed(self) -> NoReturn:
        tail = self._tail
        if (at := tail.rfind(b"\xa6detail")) >= 0:
            tail = tail[at + 7 :]
        elif (at := tail.rfind(b"\x88")) >= 0:
            tail = tail[at + 4 :]
        else:
            tail = b"no reason was given"
        text = "".join(c for c in tail.decode(errors="ignore") if c.isprintable())
        raise Closed(text[:120])


class Stopped(Exception):
    """The attack is over."""


_state = {"stop": False}


def stopped() -> bool:
    """Return whether the attack is over."""
    return _state["stop"]


def attack(options: dict[str, Any], number: int, ready: Callable[[], None]) -> dict[str, Any]:
    """Attack until told to stop, or until `chunks` were sent in each attack.

    Return for each attack what was sent, and why connections ended.
    """
    from proofs.attacks import ATTACKS

    if options["attacks"] == ["spin"]:
        ready()
        while not stopped():
            pass
        return {}
    results = {}
    for name in options["attacks"]:
        left = options["chunks"] or 1 << 62
        connections = sent_bytes = 0
        closed: Counter[str] = Counter()
        while left > 0 and not stopped():
            attacker = Attacker(options["where"], number)
            connections += 1
            attacker.brief = bool(options["chunks"])
            try:
                left -= _run(ATTACKS[name].make(attacker), attacker, left, ready)
                if ATTACKS[name].breaks:
                    attacker.end()
                elif left <= 0 and ATTACKS[name].settles:
                    attacker.settle()
            except Closed as err:
                closed[str(err)] += 1
                left -= 1
            except Stopped:
                left = 0
            finally:
                sent_bytes += attacker.sent_bytes
                attacker.close()
                ready()
        ends = dict(closed.most_common(4))
        results[name] = {"bytes": sent_bytes, "connections": connections, "closed": ends}
    return results


def _run(chunks: Iterator[bytes], attacker: Attacker, most: int, ready: Callable[[], None]) -> int:
    """Send at most `most` chunks of one connection; return how many were sent."""
    number = 0
    for number, chunk in enumerate(chunks):
        if not number:
            ready()
        if stopped():
            raise Stopped
        if chunk:
            attacker.flood(chunk)
        if number + 1 >= most:
            break
    return number + 1


def main() -> None:
    """Fork the attackers, print "ready" when all have begun, and one JSON line for all at the end."""
    options = json.loads(sys.argv[1])
    signal.signal(signal.SIGTERM, lambda number, frame: _state.update(stop=True))
    signal.alarm(int(options["deadline_s"]))
    import proofs.attacks  # noqa: F401 - once for all

    pipes = [_fork(options, number) for number in range(options["processes"])]
    for _, pipe in pipes:
        pipe.readline()
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    if not options["chunks"]:
        while not stopped():
            time.sleep(0.02)
        for pid, _ in pipes:
            os.kill(pid, signal.SIGTERM)
    results = []
    for pid, pipe in pipes:
        results.append(json.loads(pipe.read() or '{"failed": "it was killed"}'))
        pipe.close()
        os.waitpid(pid, 0)
    sys.stdout.write(json.dumps({"results": results}) + "\n")
    sys.stdout.flush()


def _fork(options: dict[str, Any], number: int) -> tuple[int, IO[bytes]]:
    """Start one attacker; return its process id and a pipe with "ready" and its results."""
    reading, writing = os.pipe()
    parent = os.getpid()
    pid = os.fork()
    if pid:
        os.close(writing)
        return pid, os.fdopen(reading, "rb")
    _libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # it ended before
        os._exit(1)
    said: list[int] = []

    def ready() -> None:
        if not said:
            said.append(os.write(writing, b"ready\n"))

    signal.alarm(int(options["deadline_s"]))
    try:
        result = attack(options, number, ready)
    except BaseException as err:  # the proof shows it
        result = {"failed": f"{type(err).__name__}: {err}"}
    ready()
    with os.fdopen(writing, "wb") as pipe:
        pipe.write(json.dumps(result).encode())
    os._exit(0)


if __name__ == "__main__":
    # So that the attacks refer to the same state: this file as a module, not as `__main__`.
    from support import attacker

    attacker.main()
