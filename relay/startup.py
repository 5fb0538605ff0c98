"""Holds the sessions of a relay that starts until its store and its links are back, for a limited time.

    <socket>.links   {"links": 2, "relay": "…"}: how many links and WAN connections the relay had, and its id; mode 0600

Programs keep what they publish while their relay restarts, and send it as soon as they are admitted. If the relay were
not linked yet by then, or its store did not record yet, these messages would miss receivers that had them before, and
nobody would count the loss. Sessions are held for at most `BACK_S` for links and for a store, or `WORD_S` for a store
that was closed well.

A store notes up to where its streams are complete (`relay.store.completeness`). The note is valid if no other relay has
admitted sessions at this socket since: a relay started without the data directory cannot remove the note, but it
writes its own id into the file here.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

from iris.errors import ConfigError
from relay import statefile
from relay.core.router import Router
from relay.net.sessions import SessionHub
from relay.supervisor import StoreSupervisor

log = logging.getLogger(__name__)

BACK_S: Final = 3.0
WORD_S: Final = 10.0
"""Limit for a store that was closed well, whose streams can continue without a gap. Only a busy host takes so long."""
LOOK_S: Final = 0.01
UNKNOWN: Final = "unknown"


class StartupGate:
    """Holds the sessions of one relay from `start` until its store and links are back, then calls `opened`."""

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
        """How long to wait for the store."""
        self._links_due = 0
        self._written = (0, "")
        self._began_s = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._open = self._faulty = self._frozen = False

    @property
    def unread(self) -> bool:
        """Whether nothing can have been published here yet, nor elsewhere for subscribers here."""
        return not self._open and self._router.alone

    def start(self, *, linked: bool) -> None:
        """Hold sessions if a store or links are expected back. `linked`: this relay may have links at all.

        Raises ConfigError: the store's note that its streams are complete is wrong, and cannot be removed.
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
                    raise ConfigError(
                        f"data: cannot remove the note of the last store: {err}"
                    ) from err
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
        """Stop writing the file and admitting sessions: the relay stops. Idempotent."""
        self._frozen = True
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def links_changed(self) -> None:
        """Note that a link or WAN connection came up or went down."""
        if not self._frozen:
            self._write()

    def _look(self) -> None:
        if self._store is not None and self._router.stores.own_store_is_up:
            self._store_due = False
        after_s = time.monotonic() - self._began_s
        linked = sum(link.replica.known for link in self._router.links.values())
        linked += sum(wan.replica.known for wan in self._router.wans.values())
        due = self._store_due and not self._router.stores.own_store_failed
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
        """Remove the store's note if sessions are admitted without it: its streams may miss messages."""
        if self._store_due and self._store is not None:
            try:
                self._store.forget_completeness()
            except OSError as err:
                log.error("door.not_forgotten", extra={"fields": {"error": str(err)}})

    # -- the file --------------------------------------------------------------------------------------------

    def _read(self) -> tuple[int, str]:
        """Return the previous relay's number of links and its id ("" without a file, `UNKNOWN` if it is not valid)."""
        try:
            found = statefile.read(self._path)
            links, relay = found["links"], found["relay"]
        except FileNotFoundError:
            return 0, ""
        except (OSError, ValueError, TypeError, KeyError):
            return 0, UNKNOWN
        sound = type(links) is int and links >= 0 and type(relay) is str
        return (links, relay) if sound else (0, UNKNOWN)

    def _write(self) -> None:
        links = len(self._router.links) + len(self._router.wans)
        if not self._open:  # a relay that is killed before all are back must not lower the number
            links = max(links, self._written[0])
        kept = self._store is not None or self._written[1]
        now = (links, self._router.relay_id.hex() if kept else "")
        if now == self._written:
            return
        try:
            statefile.replace(self._path, {"links": now[0], "relay": now[1]} if any(now) else None)
        except OSError as err:
            if not self._faulty:
                self._faulty = True
                fields = {"path": str(self._path), "error": str(err)}
                log.warning("door.not_kept", extra={"fields": fields})
            return
        self._written = now
