"""Starts the process that serves a relay's metrics, and starts it again whenever it ends.

The relay binds the port and passes it on. So a port in use is an error when the relay starts, and a scraper waits while
the process is started again.
"""

from __future__ import annotations

import errno
import importlib.util
import logging
import socket
import sys

from iris.errors import ConfigError
from iris.extras import install_line
from relay.address_settings import parse_metrics
from relay.child import Child
from relay.config import RelayConfig
from relay.net.addresses import listen_at, show

log = logging.getLogger(__name__)


class MetricsSupervisor(Child):
    """The process that serves the metrics, kept running while `run` runs."""

    def __init__(self, config: RelayConfig) -> None:
        """Bind the address of `config.metrics`. Raises ConfigError."""
        check_installed()
        self.listener = listen(config.metrics)
        super().__init__(
            (
                sys.executable, "-P", "-m", "relay.metrics", "--listener", str(self.listener.fileno()), "--relay", str(config.socket_path),
                "--trusted-user", config.trusted_user, "--log-format", config.log_format,
            ),
            pass_fds=(self.listener.fileno(),),
        )  # fmt: skip

    @property
    def address(self) -> str:
        """HOST:PORT at which metrics are served."""
        return show(*self.listener.getsockname()[:2])

    def pass_on(self, line: bytes) -> None:
        """Give the process figures of the store; they are dropped while it does not run or has not read the last."""
        pipe = self._process.stdin if self._process is not None else None
        if (
            pipe is not None
            and not pipe.is_closing()
            and not pipe.transport.get_write_buffer_size()
        ):
            pipe.write(line)

    async def stop(self) -> None:
        """Kill the process, which holds nothing that matters, and wait for its end. Idempotent."""
        process = self._process
        self.kill()
        if process is not None:
            await process.wait()

    def close(self) -> None:
        """Kill the process and close the port. Idempotent."""
        self.kill()
        self.listener.close()

    def status(self) -> dict[str, object]:
        """Return what `iris status` shows of it, ready for JSON."""
        return {"address": self.address, "pid": self.pid, "starts": self._starts, "last_exit": self._last_exit}  # fmt: skip

    def _not_started(self, err: OSError) -> None:
        log.error("metrics.not_started", extra={"fields": {"error": str(err)}})

    def _ended(self, code: int) -> None:
        log.error("metrics.ended", extra={"fields": {"exit": code}})


def check_installed() -> None:
    """Raise ConfigError if the package for metrics is not installed."""
    if importlib.util.find_spec("prometheus_client") is None:
        raise ConfigError(f"metrics: needs prometheus-client: {install_line('metrics')}")


def listen(metrics: str) -> socket.socket:
    """Return a socket that listens at the address of the setting. Raises ConfigError."""
    host, port = parse_metrics(metrics)
    try:
        return listen_at("metrics", host, port)
    except OSError as err:
        why = f"{err.strerror}: {show(host, port)}"
        if err.errno == errno.EADDRINUSE:
            why += "; stop what listens there, or choose another port"
        raise ConfigError(f"metrics: cannot serve metrics: {why}") from err
