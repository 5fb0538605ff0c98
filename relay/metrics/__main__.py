"""`python -m relay.metrics`: serves the metrics of one relay until its standard input ends. Relays start it."""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import socket
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from iris import program
from iris.config import ClientConfig
from relay.logs import configure
from relay.metrics.server import LOOK_S, Server
from relay.metrics.source import ANSWER_S, RelaySource

LABEL: Final = "iris-metrics"
NICE: Final = 5
"""A flood of scrapers must not take the processor from the relay."""


def main(argv: Sequence[str] | None = None) -> None:
    """Serve until standard input ends, as it does when the relay ends. Signals to the relay's group are ignored."""
    program.begin()
    parser = argparse.ArgumentParser(prog="python -m relay.metrics")
    parser.add_argument("--listener", type=int, required=True, help="Descriptor of a listening socket.")  # fmt: skip
    parser.add_argument("--relay", type=Path, required=True)
    parser.add_argument("--trusted-user", required=True)
    parser.add_argument("--log-format", required=True)
    given = parser.parse_args(argv)
    configure("WARNING", given.log_format)  # its sessions come and go with the relay
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    with contextlib.suppress(OSError):  # a sandbox may forbid it
        os.nice(NICE)
    config = ClientConfig(
        relay=given.relay, trusted_user=given.trusted_user, label=LABEL, connect_timeout_s=ANSWER_S
    )
    source = RelaySource(config)
    server = Server(socket.socket(fileno=given.listener), source)
    threading.Thread(target=_until_input_ends, args=(server, source), daemon=True).start()
    try:
        server.serve_forever(LOOK_S)
    finally:
        server.server_close()
        source.close()


def _until_input_ends(server: Server, source: RelaySource) -> None:
    with os.fdopen(0, "rb") as lines:
        for line in lines:
            source.store_said(line)
    server.shutdown()


if __name__ == "__main__":
    main()
