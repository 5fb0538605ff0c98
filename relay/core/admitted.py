"""The ticket of one session over WebSocket, and what it allows."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import TYPE_CHECKING, Final

from iris.wire.consumers import Attend, Consume, DescribeConsumers, Settle
from relay.core.issuers import Issuer

if TYPE_CHECKING:
    from iris.crypto.tickets import Ticket
    from iris.wire.streams import Call


MAX_WORKERS: Final = 1024
"""Workers of consumers that are not shared, in one session with a ticket. A subject's sessions are limited."""


class Admitted:
    """The ticket of one session."""

    __slots__ = ("checked", "epoch_us", "issuer", "names", "surplus", "ticket", "workers")

    def __init__(self, ticket: Ticket, issuer: Issuer, epoch_us: int) -> None:
        self.ticket = ticket
        self.issuer = issuer
        self.epoch_us = epoch_us
        """The beginning of 1970 by the router's clock, as the wall clock had it when the ticket was accepted."""
        self.surplus = False
        """Whether its subject has more sessions than its issuer allows now, and this is one of the newest."""
        self.checked = 0
        """The reload of issuers and revoked tickets after which it was last checked against them."""
        self.names: dict[tuple[str, bytes], str] = {}
        """(uuid in hex, key id) -> name of the stream."""
        self.workers: set[bytes] = set()
        """Its workers of consumers that are not shared, which are active or stand by."""

    @property
    def holder(self) -> tuple[str, str]:
        """(issuer, subject)."""
        return self.issuer.name, self.ticket.subject

    def over(self, now_us: int) -> str:
        """Return why it is not valid any more at `now_us` of the router's clock, or an empty text."""
        age_us = now_us - self.epoch_us
        if age_us >= self.ticket.expires_s * 1_000_000:
            return "the ticket expired"
        if age_us >= (self.ticket.issued_s + self.issuer.max_life_s) * 1_000_000:
            return "the ticket is older than its issuer allows now"
        return ""

    def consumer_refusal(self, call: Call | None, stream: str) -> str:
        """Return why a call about consumers of a stream is not allowed, or an empty text.

        A ticket that names consumers allows those alone, and none allows a new consumer: it would take one of the few
        places of the stream's owner.
        """
        if not isinstance(call, Consume | Settle | Attend | DescribeConsumers):
            return ""
        name = "" if isinstance(call, DescribeConsumers) else call.consumer
        if not (
            self.issuer.allow.consumes(stream, name) and self.ticket.allow.consumes(stream, name)
        ):
            what = f"consumer {name!r}" if name else "the list of consumers"
            return f"the ticket does not allow consume for {what} of {stream!r}"
        if isinstance(call, DescribeConsumers) and call.workers:
            return (
                f"the ticket does not allow the workers of {stream!r} to be listed: no ticket does"
            )
        if isinstance(call, Settle) and call.gone:
            self.workers.discard(call.worker)
        if isinstance(call, Consume) and not (
            call.shared or call.create or self._seats(call.worker)
        ):
            return f"the ticket's session has {MAX_WORKERS} workers that are active or stand by, which is the limit; close some"
        if isinstance(call, Consume) and call.create:
            return (
                f"the ticket does not allow consumer {name!r} of {stream!r} to be created: no ticket does; "
                "have a program with the stream's key create it, and set create=False to use one that exists"
            )
        return ""

    def _seats(self, worker: bytes) -> bool:
        """Return whether this worker may be active or stand by. Those that were not closed count for good."""
        if worker not in self.workers and len(self.workers) >= MAX_WORKERS:
            return False
        self.workers.add(worker)
        return True

    def refusal(
        self, verbs: Sequence[str], name: str, key_ids: Iterable[bytes], proven: Collection[bytes]
    ) -> str:
        """Return why none of `verbs` is allowed for a name under these keys, or an empty text."""
        if not any(
            self.issuer.allow.allows(verb, name) and self.ticket.allow.allows(verb, name)
            for verb in verbs
        ):
            return f"the ticket does not allow {' or '.join(verbs)} for {name!r}"
        keys = self.ticket.keys
        for key_id in key_ids:
            if keys and key_id not in keys:
                return f"the ticket does not name key {key_id.hex()[:8]}"
        if not all(key_id in proven for key_id in keys):
            missing = sorted(key_id.hex()[:8] for key_id in keys if key_id not in proven)
            return f"the ticket requires a proof of key {missing[0]} before anything else"
        return ""
