"""Whether anything can have been published between two sessions of a store, which nobody would have counted.

    BYE, complete ──► what stands in each log now is all ── file, if the store ends with its relay ──► the next store
    SUBSCRIBE, JOIN ──► ACK, fresh: the relay routed nothing of that kind before ── the stream goes on without a gap

In all other cases a gap of unknown count stands between them. The file names the relay that said BYE: the next relay at its socket
removes it if there was another in between (`relay.startup`).
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from relay.store.database import write_beside
from relay.store.stream import Stream
from relay.supervisor import COMPLETE_FILE_BYTES, remove_complete_file


class Completeness:
    """The streams of one store that miss nothing up to now, as far as anybody knows."""

    def __init__(self) -> None:
        self.complete: set[bytes] = set()
        """By uuid: until a relay has said what it routed before they were there."""
        self._relay = ""
        """Which relay said last that they are."""
        self._registered = False

    def load(self, path: Path, streams: Iterable[Stream]) -> None:
        """Read what the store before this one left, once: whatever happens from here on, the file says nothing any more. Raises OSError."""
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
        """A session has begun."""
        self._registered = False

    def registered(self) -> None:
        """The relay has answered all that we asked it for at first: what is missed from here on, the session tells."""
        self._registered = True
        self.complete.clear()

    def missed_at_start(self) -> set[bytes]:
        """The relay had routed something before we were there. Return the streams that may miss it."""
        missing, self.complete = self.complete, set()
        return missing

    def session_ended(self, streams: Iterable[Stream], relay: bytes, *, complete: bool) -> None:
        """The session is over; all that it brought has been written. `complete`: `relay` said so."""
        if self._registered:
            self.complete = (
                {stream.uuid for stream in streams if stream.complete} if complete else set()
            )
            self._relay = relay.hex()

    def save(self, path: Path, streams: Iterable[Stream], *, unread: bool = False) -> None:
        """Write down what is whole for the next store. Raises LogWriteFailed.

        Before all was registered, only the relay knows whether anything was missed: `unread` says that nothing was.
        """
        ends = {s.uuid.hex(): s.log.next for s in streams if s.uuid in self.complete and s.log}
        if ends and (self._registered or unread):
            said = {"relay": self._relay, "streams": ends}
            write_beside(str(path), json.dumps(said).encode())
