"""Decides whether a stream can have missed messages between two sessions of a store, when nobody
counted them.

    BYE, complete ──► each log now holds everything ── a file, if the store exits with its relay ──► the next store
    SUBSCRIBE, JOIN ──► ACK, fresh: the relay has routed nothing of that kind before ── no gap is recorded

In all other cases a gap of unknown count is recorded between the sessions. The file names the relay
that sent BYE. The next relay at that relay's socket removes the file if another relay ran in
between (`relay.startup`).
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from relay.store.files import write_beside
from relay.store.stream import Stream
from relay.supervisor import COMPLETE_FILE_BYTES, remove_complete_file


class Completeness:
    """Which streams of one store have certainly missed nothing so far."""

    def __init__(self) -> None:
        self.complete: set[bytes] = set()
        """Uuids of the complete streams. Empty once a relay has answered all registrations."""
        self._relay = ""
        """Hex id of the relay that last confirmed it."""
        self._registered = False

    def load(self, path: Path, streams: Iterable[Stream]) -> None:
        """Read and remove the file that the previous store wrote. It is valid once only. Raises OSError."""
        try:
            with path.open("rb") as file:
                said = json.loads(file.read(COMPLETE_FILE_BYTES))
            relay, ends = said["relay"], dict(said["streams"])
        except (OSError, ValueError, TypeError, KeyError):
            relay, ends = "", {}
        remove_complete_file(path)
        self._relay = str(relay)
        self.complete = {
            s.uuid for s in streams if s.complete and s.log and ends.get(s.uuid.hex()) == s.log.next
        }

    def session_began(self) -> None:
        """A session with a relay has begun."""
        self._registered = False

    def registered(self) -> None:
        """The relay has answered all registrations. From here on the session reports every loss."""
        self._registered = True
        self.complete.clear()

    def missed_at_start(self) -> set[bytes]:
        """The relay had routed messages before it received our interest.

        Return the streams that may have missed them.
        """
        missing, self.complete = self.complete, set()
        return missing

    def session_ended(self, streams: Iterable[Stream], relay: bytes, *, complete: bool) -> None:
        """The session has ended and everything it delivered is written.

        `complete`: `relay` confirmed that this is all.
        """
        if self._registered:
            self.complete = (
                {stream.uuid for stream in streams if stream.complete} if complete else set()
            )
            self._relay = relay.hex()

    def save(self, path: Path, streams: Iterable[Stream], *, unread: bool = False) -> None:
        """Write the file for the next store: which streams are complete, and their ends. Raises
        LogWriteFailed.

        Before the registrations were answered, only the relay knows whether anything was missed.
        `unread` says that nothing was.
        """
        ends = {s.uuid.hex(): s.log.next for s in streams if s.uuid in self.complete and s.log}
        if ends and (self._registered or unread):
            said = {"relay": self._relay, "streams": ends}
            write_beside(str(path), json.dumps(said).encode())
