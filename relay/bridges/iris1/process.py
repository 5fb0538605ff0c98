"""The bridge as a process: an ordinary client with a keyring, until SIGTERM or SIGINT."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import signal
from typing import Final

import iris
from iris.signals import on_signal
from relay.bridges.iris1.bridge import Bridge
from relay.bridges.iris1.config import Iris1Config
from relay.logs import configure
from relay.metrics.supervisor import check_installed
from relay.process import loop_factory, raise_descriptor_limit, stop_on_signals

log = logging.getLogger(__name__)

COUNTERS_S: Final = 60.0
"""How often the counters are logged, if they have changed."""


async def serve(config: Iris1Config, relay: str | None, metrics: str = "") -> None:
    """Run a bridge until SIGTERM or SIGINT; a second signal ends the process at once. SIGHUP reloads the keyring."""
    loop = asyncio.get_running_loop()
    stop = stop_on_signals()
    own = iris.ClientConfig(relay=relay, label="iris bridge iris1", keep_freed_memory=True)
    # Its own session reports a missing relay or key at the start, and `iris status` shows it.
    async with iris.connect(config=own) as client:

        def connect(label: str) -> iris.Client:
            settings = iris.ClientConfig(
                relay=relay, label=label, drain_timeout_s=config.drain_s, message_limit_bytes=64 << 20
            )  # fmt: skip
            return iris.connect(config=settings, keyring=client.keyring)

        bridge = Bridge(config, connect)
        reloads: set[asyncio.Task[None]] = set()

        def on_hangup() -> None:
            task = loop.create_task(_reload(client, bridge), name="iris1-reload")
            reloads.add(task)
            task.add_done_callback(reloads.discard)

        on_signal(signal.SIGHUP, on_hangup)
        await bridge.start()
        page = contextlib.ExitStack()
        try:
            if metrics:
                check_installed()
                from relay.bridges.iris1.metrics import source
                from relay.metrics.bridges import serving

                page.enter_context(serving(metrics, source(bridge)))
            gc.collect()
            gc.freeze()  # collecting all that was imported takes longer than clients expect an event to take
            while not stop.is_set():
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(COUNTERS_S):
                        await stop.wait()
                bridge.log_counters()
        finally:
            page.close()
            await bridge.stop()
            for task in reloads:
                task.cancel()


async def _reload(client: iris.Client, bridge: Bridge) -> None:
    try:
        await client.reload_keys()
    except iris.IrisError as err:  # the old keys remain in use
        log.error("bridge.keys_not_reloaded", extra={"fields": {"error": str(err)}})
        return
    left_behind = await bridge.reload_keys(client.keyring)
    log.info("bridge.keys_reloaded", extra={"fields": {"left_behind": left_behind}})


def run(
    config: Iris1Config, relay: str | None, log_level: str, log_format: str, metrics: str = ""
) -> None:
    """Run a bridge in this process until it is stopped by a signal."""
    configure(log_level, log_format)
    raise_descriptor_limit()
    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        runner.run(serve(config, relay, metrics))
