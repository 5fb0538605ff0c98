"""The cost of the bridge for the first Iris, between programs behind it, measured as that Iris's own benchmarks do.

    python bench/iris1.py                  # all figures, a relay and a bridge of its own
    python bench/iris1.py --seconds 1 --figures request publish

One program, one connection that is service, caller, subscriber and publisher, payloads of one byte, as in its Go
binding's benchmarks: `request`, `broadcast`, `publish` and `tunnel` (a message there and back) with one in flight,
µs as p50, p99; `rate` with 128 requests in flight, per second; `first` the first publication after 100 ms of rest,
µs. `apart`: caller and service are two programs, p50 in µs. Prints JSON.
"""

from __future__ import annotations

import argparse
import json
import signal
import socket
import time
from collections.abc import Callable
from typing import Final

import harness
from bridges import blob, bridge_port, exactly, old_close, old_connect, varint
from harness import BENCH, IrisRelay, Result, Roles

CLUSTER: Final = "bench"
TOPIC: Final = "bench-topic"
CALLERS: Final = 128
WARM: Final = 200
NAME: Final = blob(CLUSTER.encode())


def timed(once: Callable[[int], None], seconds: float, rest_s: float = 0.0) -> Result:
    """Repeat a call and return the percentiles of its duration."""
    for number in range(WARM if not rest_s else 3):
        once(number)
    number = WARM
    samples_ns: list[int] = []
    end_s = time.perf_counter() + seconds
    while time.perf_counter() < end_s:
        if rest_s:
            time.sleep(rest_s)
        begin_ns = time.perf_counter_ns()
        once(number)
        samples_ns.append(time.perf_counter_ns() - begin_ns)
        number += 1
    return harness.percentiles_us(samples_ns)


def request(link: socket.socket, seconds: float) -> Result:
    def once(number: int) -> None:
        id = varint(number)
        link.sendall(b"\x04" + id + NAME + b"\x01x\x88\x27")
        frame = exactly(link, 1)
        assert frame == b"\x04", frame
        theirs = read_varint(link)
        assert exactly(link, 4) == b"\x01x\x88\x27"
        link.sendall(b"\x05" + theirs + b"\x01\x01x")
        wanted = b"\x05" + id + b"\x00\x01\x01x"
        assert exactly(link, len(wanted)) == wanted

    return timed(once, seconds)


def read_varint(link: socket.socket) -> bytes:
    data = exactly(link, 1)
    while data[-1] > 127:
        data += exactly(link, 1)
    return data


def cast(link: socket.socket, said: bytes, wanted: bytes, seconds: float, rest_s: float) -> Result:
    def once(number: int) -> None:
        link.sendall(said)
        assert exactly(link, len(wanted)) == wanted

    return timed(once, seconds, rest_s)


def broadcast(link: socket.socket, seconds: float) -> Result:
    return cast(link, b"\x03" + NAME + b"\x01x", b"\x03\x01x", seconds, 0.0)


def publish(link: socket.socket, seconds: float, rest_s: float = 0.0) -> Result:
    event = b"\x08" + blob(TOPIC.encode()) + b"\x01x"
    link.sendall(b"\x06" + blob(TOPIC.encode()))
    return cast(link, event, event, seconds, rest_s)


def first(link: socket.socket, seconds: float) -> Result:
    return publish(link, seconds, 0.1)


def tunnel(link: socket.socket, seconds: float) -> Result:
    link.sendall(b"\x09\x01" + NAME + b"\x88\x27")
    seen = b""
    while (
        len(seen) < 20
    ):  # TUN_INIT for the service, TUN_CONFIRM and TUN_ALLOW for the caller, in either order
        part = link.recv(4096)
        seen += part
        if b"\x09" in seen and b"\x0a\x01\x00" in seen:
            break
    build = seen[seen.index(b"\x09") + 1 :][:1]
    link.sendall(
        b"\x0a"
        + build
        + b"\x02"
        + b"".join(b"\x0b" + id + varint(64 << 20) for id in (b"\x01", b"\x02"))
    )
    link.settimeout(0.3)
    try:
        while link.recv(4096):
            pass  # further grants
    except TimeoutError:
        link.settimeout(None)

    def once(number: int) -> None:
        for mine, theirs in ((b"\x01", b"\x02"), (b"\x02", b"\x01")):
            link.sendall(b"\x0c" + mine + b"\x01\x01x")
            wanted = b"\x0c" + theirs + b"\x01\x01x"
            assert exactly(link, len(wanted)) == wanted
            # without grants: few bytes pass, and the windows are wide

    return timed(once, seconds)


def rate(link: socket.socket, seconds: float) -> Result:
    """Measure requests with 128 in flight."""
    next_id = CALLERS
    link.sendall(b"".join(b"\x04" + varint(id) + NAME + b"\x01x\x88\x27" for id in range(CALLERS)))
    done = 0
    rest = b""
    begin_s = time.perf_counter()
    end_s = begin_s + seconds
    failed = 0
    while True:
        data = rest + link.recv(1 << 18)
        at = 0
        out: list[bytes] = []
        size = len(data)
        while at < size:
            end = at + 1
            while end < size and data[end] > 127:
                end += 1
            end += 1
            if data[at] == 4:
                if end + 4 > size:
                    break
                out.append(b"\x05" + data[at + 1 : end] + b"\x01\x01x")
                at = end + 4
            else:
                if end >= size or (not data[end] and end + 4 > size):
                    break
                failed += data[end]
                done += 1
                at = end + (1 if data[end] else 4)
                out.append(b"\x04" + varint(next_id) + NAME + b"\x01x\x88\x27")
                next_id += 1
        rest = data[at:]
        if time.perf_counter() > end_s:
            break
        if out:
            link.sendall(b"".join(out))
    return {"rate": round(done / (time.perf_counter() - begin_s)), "failed": failed}


FIGURES: Final[dict[str, Callable[[socket.socket, float], Result]]] = {
    "request": request,
    "broadcast": broadcast,
    "publish": publish,
    "first": first,
    "tunnel": tunnel,
    "rate": rate,
}


def client(port: int, seconds: float, figure: str) -> Result:
    link = old_connect(port, CLUSTER)
    link.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 20)
    result = FIGURES[figure](link, seconds)
    if figure != "rate":
        old_close(link)
    return result


def apart(port: int, seconds: float) -> Result:
    """Measure requests between two programs, a caller and a service."""
    import bridges

    return bridges.old_client(port, seconds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seconds", type=float, default=1.0)
    parser.add_argument(
        "--figures", nargs="*", choices=[*FIGURES, "apart"], default=[*FIGURES, "apart"]
    )
    parser.add_argument(
        "--bridge-prefix", default="", help="a program that runs the bridge, to profile it"
    )
    parser.add_argument("--role", help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.role:
        signal.alarm(90)  # ends this role even if the bench is killed
        if args.role == "server":
            from bridges import old_server

            harness.report("server", old_server(args.port))
        elif args.role == "apart":
            harness.report("apart", apart(args.port, args.seconds))
        else:
            harness.report(args.role, client(args.port, args.seconds, args.role))
        return
    script = str(BENCH / "iris1.py")
    results: Result = {}
    with Roles(len(args.figures) * (args.seconds + 5) + 60) as roles:
        relay = IrisRelay(roles)
        command = ["-m", "iris.cli", "bridge", "iris1", "--listen", "127.0.0.1:0"]
        bridge = roles.start(
            "bridge", [*args.bridge_prefix.split(), *command], env=relay.env, reports=False
        )
        options = [f"--seconds={args.seconds}", f"--port={bridge_port(bridge)}"]
        for figure in args.figures:
            spent = bridge.cpu_s(), relay.role.cpu_s()
            if figure == "apart":
                roles.start(
                    "server", [script, "--role=server", *options], env=relay.env, ready=True
                )
            results[figure] = roles.start(
                figure, [script, f"--role={figure}", *options], env=relay.env
            ).result()
            results[figure]["cpu_s"] = [
                round(b - a, 2)
                for a, b in zip(spent, (bridge.cpu_s(), relay.role.cpu_s()), strict=True)
            ]
        bridge.process.terminate()
        bridge.process.wait(harness.START_S)
        relay.stop()
    print(json.dumps({"facts": harness.facts(), "figures": results}, indent=1))


if __name__ == "__main__":
    main()
