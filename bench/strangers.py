"""Measure requests at a relay, without and with 10,000 half-open connections to its link port.

    python bench/strangers.py

Half of the strangers send nothing, the others half a ClientHello, and nothing after it. They connect one after the
other, as fast as the relay accepts, and take at least half of the measurement. Requests: 256 bytes, a closed loop,
one in flight. Prints JSON: `p99_us` with the strangers, `alone_p99_us` without, `ratio`; and how the relay
answered: `refused` (reason -> count), and `spent_s`, the time in which all were opened.
"""

from __future__ import annotations

import argparse
import errno
import json
import resource
import signal
import socket
import ssl
import sys
import time

import harness
from harness import BENCH, IrisRelay, Result, Roles
from roundtrip import figures

SCRIPT = str(BENCH / "strangers.py")
ROUNDTRIP = str(BENCH / "roundtrip.py")
SIZE = 256
SPARE_DESCRIPTORS = 256
CONNECT_S = 5.0
TURN_S = 0.01
"""Pause between connections, so that the strangers' process uses little of a processor."""


def allow_descriptors(count: int) -> None:
    """Allow this process and its children `count` descriptors; raises ValueError if the hard limit is lower."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, count), hard))


# -- the strangers -------------------------------------------------------------------------------------------


def client_hello() -> bytes:
    """Return a TLS ClientHello."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    try:
        context.wrap_bio(incoming, outgoing, server_hostname="0" * 32).do_handshake()
    except ssl.SSLWantReadError:
        return outgoing.read()
    raise AssertionError("the TLS handshake ended without a peer")


def strangers(address: str, count: int, pace: float) -> Result:
    """Open `count` connections at `pace` a second and hold them until stopped. "ready" after the first and after
    the last."""
    allow_descriptors(count + SPARE_DESCRIPTORS)
    stopped: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, frame: stopped.append(number))
    host, _, port = address.rpartition(":")
    half = client_hello()
    half = half[: len(half) // 2]
    held: list[socket.socket] = []
    failures = 0
    begin_s = time.perf_counter()
    spent_s = 0.0
    while not stopped and len(held) + failures < count:
        due = min(count, int((time.perf_counter() - begin_s) * pace) + 1)
        while not stopped and len(held) + failures < due:
            try:
                connection = socket.create_connection((host, int(port)), CONNECT_S)
                if len(held) % 2:
                    connection.send(half)
            except OSError:
                failures += 1
                continue
            connection.setblocking(False)
            held.append(connection)
            if len(held) == 1:
                harness.say_ready()
        spent_s = time.perf_counter() - begin_s
        time.sleep(TURN_S)
    harness.say_ready()
    while not stopped:
        time.sleep(TURN_S)
    ended = sum(map(is_ended, held))
    for connection in held:
        connection.close()
    return {"opened": len(held), "failed": failures, "spent_s": spent_s, "ended_by_relay": ended}


def is_ended(connection: socket.socket) -> bool:
    """Return whether the other side has closed."""
    try:
        return connection.recv(1) == b""
    except BlockingIOError:
        return False
    except OSError as err:
        if err.errno not in (errno.ECONNRESET, errno.EPIPE):
            raise
        return True


# -- runs ----------------------------------------------------------------------------------------------------


def measure(count: int, seconds: float) -> Result:
    """Send requests for `seconds` while `count` strangers (0: none) connect."""
    with Roles(seconds + 75) as roles:
        relay = IrisRelay(roles, links=True)
        asking = [ROUNDTRIP, "--role=client", f"--size={SIZE}", f"--seconds={seconds}"]
        served = roles.start("server", [ROUNDTRIP, "--role=server"], env=relay.env, ready=True)
        if count:
            options = [f"--count={count}", f"--pace={2 * count / seconds}"]
            command = [SCRIPT, "--role=strangers", f"--address={relay.link_address()}", *options]
            outside = roles.start("strangers", command, ready=True)
        result = roles.start("client", asking, env=relay.env).result()
        answer: Result = {}
        if count:
            outside.wait_ready()
            status = relay.status()
            answer = {
                "refused": status["links_refused"],
                "half_open": status["links_half_open"],
                **outside.result(stop=True),
            }
        server_cpu_s = served.result(stop=True)["cpu_s"]
        return {**figures(result, relay.stop(), server_cpu_s), "strangers": answer}


def main() -> None:
    parser = harness.parser(__doc__)
    parser.set_defaults(seconds=20.0, rounds=3)
    parser.add_argument("--count", type=int, default=10_000)
    parser.add_argument("--pace", type=float, default=0.0, help=argparse.SUPPRESS)
    parser.add_argument("--address", help=argparse.SUPPRESS)
    parser.add_argument("--role", choices=["strangers"], help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.role:
        signal.alarm(90)  # ends this role even if the bench is killed
        harness.report(args.role, strangers(args.address, args.count, args.pace))
        return
    options = {name: getattr(args, name) for name in ("seconds", "rounds", "count")}
    about = {"bench": "strangers", "options": options, "facts": harness.facts()}
    sides = {
        "iris": lambda: measure(args.count, args.seconds),
        "alone": lambda: measure(0, args.seconds),
    }
    try:
        # The relay needs a descriptor for its end of each, too; it raises its own limit to the hard limit.
        allow_descriptors(args.count + SPARE_DESCRIPTORS)
    except ValueError as err:
        sys.exit(
            f"cannot open {args.count} connections: {err}; raise the limit of open files, or use --count"
        )
    rounds = harness.alternate(args.rounds, sides)
    summary = harness.compare(rounds, "p99_us", other="alone")
    summary |= harness.compare(rounds, "p50_us", "p50_ratio", other="alone")
    answers = [r["iris"]["strangers"] for r in rounds]
    print(json.dumps({**about, **summary, "strangers": answers, "rounds": rounds}, indent=1))
    if any(answer["opened"] < args.count for answer in answers):
        sys.exit(f"not all of {args.count} connections were opened; see 'strangers' in the output")


if __name__ == "__main__":
    main()
