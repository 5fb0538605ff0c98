"""Who is let in when a relay starts: nobody, before what it routes for is back, for at most `BACK_S`, or `WORD_S` for its store.

    <socket>.links   {"links": 2, "relay": "…"}: relays and sites that it was connected to, and which relay that was; mode 0600

Programs keep what they publish while their relay restarts, and send it as soon as they are let in. A relay that is not linked again by
then, or whose store records nothing yet, would route it past those who had it before, and nobody would have counted it.

A store leaves word of what its streams lack nothing up to (`relay.store.completeness`). That counts if no other relay has let anybody in
at this socket since: one that was started without the data directory removes nothing from there, but writes its own id here.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

from iris.errors import ConfigError
from relay.core.router import Router
from relay.net.sessions import SessionHub
from relay.supervisor import StoreSupervisor

log = logging.getLogger(__name__)

BACK_S: Final = 3.0
WORD_S: Final = 10.0
"""For a store whose streams would go on without a gap: it was closed well, so that only a busy host takes long to start it."""
LOOK_S: Final = 0.01
FILE_BYTES: Final = 256
UNKNOWN: Final = "unknown"


class StartupGate:
    """Holds the sessions of one relay from `start` until what was there before is back; `opened` is called then."""

    def __init__(
        self, hub: SessionHub, router: Router, store: StoreSupervisor | None, socket_path: Path,
        opened: Callable[[], None],
    ) -> None:  # fmt: skip
        self._hub = hub
        self._router = router
        self._store = store
        self._opened = opened
        self._path = socket_path.with_name(socket_path.name + ".links")
        self._store_due = False
        self._store_s = 0.0
        """It is waited for so long."""
        self._links_due = 0
        self._written = (0, "")
        self._began_s = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._open = self._faulty = self._frozen = False

    @property
    def unread(self) -> bool:
        """Whether nothing can have been published here yet, nor elsewhere for somebody here."""
        return not self._open and self._router.alone

    def start(self, *, linked: bool) -> None:
        """Hold sessions if something is to come back first; `linked`: this relay looks for others, or they for it.

        Raises ConfigError: its store would take up what is not true any more.
        """
        self._written = self._read()
        links, relay = self._written
        if linked:
            self._links_due = links
        if self._store is not None:
            if relay and relay != self._store.complete_for:
                try:
                    self._store.forget_completeness()
                except OSError as err:
                    raise ConfigError(f"data: {err}") from err
            self._store_due = self._store.has_streams
            self._store_s = WORD_S if self._store.complete_for else BACK_S
        self._began_s = time.monotonic()
        self._hub.held = []
        if self._store_due or self._links_due:
            within_s = self._store_s if self._store_due else BACK_S
            fields = {"store": self._store_due, "links": self._links_due, "within_s": within_s}
            log.info("door.waits", extra={"fields": fields})
        self._look()

    def freeze(self) -> None:
        """Keep what is there now, and let nobody in: the relay stops. Idempotent."""
        self._frozen = True
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def links_changed(self) -> None:
        """A link or WAN connection came or went."""
        if not self._frozen:
            self._write()

    def _look(self) -> None:
        if self._store is not None and self._router.stores.ours_is_up:
            self._store_due = False
        after_s = time.monotonic() - self._began_s
        linked = sum(link.replica.known for link in self._router.links.values())
        linked += sum(wan.replica.known for wan in self._router.wans.values())
        due = self._store_due and not self._router.stores.ours_cannot
        store_waits = due and after_s < self._store_s
        if store_waits or (linked < self._links_due and after_s < BACK_S):
            self._timer = asyncio.get_running_loop().call_later(LOOK_S, self._look)
            return
        if self._store_due or linked < self._links_due:
            fields = {"after_s": round(after_s, 3), "store": not self._store_due, "links": linked, "links_before": self._links_due}  # fmt: skip
            log.warning("door.late", extra={"fields": fields})
            missing = max(0, self._links_due - linked)
            self._router.wait_for_links(missing, time.monotonic_ns() // 1000)
            self._forget()
        self._timer = None
        self._open = True
        self._write()
        self._hub.release()
        self._opened()

    def _forget(self) -> None:
        """The store is not there, and others are let in: its streams may miss something."""
        if self._store_due and self._store is not None:
            try:
                self._store.forget_completeness()
            except OSError as err:
                log.error("door.not_forgotten", extra={"fields": {"error": str(err)}})

    # -- the file --------------------------------------------------------------------------------------------

    def _read(self) -> tuple[int, str]:
        """Return the links of the relay before, and its id: empty if there was none, `UNKNOWN` if the file does not say."""
        try:
            descriptor = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
            with open(descriptor, "rb") as file:
                said = json.loads(file.read(FILE_BYTES))
            links, relay = said["links"], said["relay"]
        except FileNotFoundError:
            return 0, ""
        except (OSError, ValueError, TypeError, KeyError):
            return 0, UNKNOWN
        sound = type(links) is int and links >= 0 and type(relay) is str
        return (links, relay) if sound else (0, UNKNOWN)

    def _write(self) -> None:
        links = len(self._router.links) + len(self._router.wans)
        if not self._open:  # a relay that is killed before all are back still knows
            links = max(links, self._written[0])
        kept = self._store is not None or self._written[1]
        now = (links, self._router.relay_id.hex() if kept else "")
        if now == self._written:
            return
        beside = self._path.with_name(self._path.name + "~")
        try:
            if any(now):
                flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW
                with open(os.open(beside, flags, 0o600), "w") as file:
                    file.write(json.dumps({"links": now[0], "relay": now[1]}) + "\n")
                beside.rename(self._path)
            else:
                self._path.unlink(missing_ok=True)
        except OSError as err:
            with contextlib.suppress(OSError):
                beside.unlink()
            if not self._faulty:
                self._faulty = True
                fields = {"path": str(self._path), "error": str(err)}
                log.warning("door.not_kept", extra={"fields": fields})
            return
        self._written = now
