"""Control frames between relays, over links and between sites."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import msgspec

from iris.errors import PeerProtocolError
from iris.wire import frames, link_frames
from iris.wire.codec import decode_control
from iris.wire.kinds import HopClass, Kind
from iris.wire.names import check_topic, printable
from relay.core.calls import Calls
from relay.core.casts import Casts
from relay.core.link import Link, check_named
from relay.core.neighbor import Neighbor
from relay.core.parts import Parts
from relay.core.site_routes import Wan

_ANSWER_KINDS: Final = (Kind.REPLY, Kind.FAULT, Kind.ANSWER, Kind.STREAM_REPLY)
"""Kinds of answers, which go where their call came from."""


class LinkControl:
    """Handles the control frames of all links of one router."""

    def __init__(self, router: Parts, calls: Calls, casts: Casts) -> None:
        self._router = router
        self._calls = calls
        self._casts = casts
        self._handlers: dict[type, Callable[[Link, Any], None]] = {
            **self._router.mesh.controls(),
            frames.Declare: self._on_declare,
            frames.Beat: self._on_beat,
            frames.Gap: self._on_gap,
            frames.Wait: router.credits.asked,
            frames.Window: router.credits.window,
            frames.Fail: calls.answers.failed_by_link,
            frames.Credit: calls.answers.credited_by_link,
            frames.CallerLeft: self._on_left,
            frames.Roster: calls.surveys.roster,
            frames.Done: calls.surveys.done,
            frames.Ping: router.peer_interest.on_ping,
            frames.Pong: self._on_pong,
            frames.Topic: self._on_topic,
            frames.Audience: router.audiences.answered,
            frames.Bye: self._on_bye,
            frames.Error: self._on_error,
        }

    def frame(self, link: Link, buf: memoryview, start: int, end: int) -> bool:
        """Handle one control frame, which may cost more than its length tells; raises PeerProtocolError."""
        link.controlled_us = self._router.now_us
        body = decode_control(buf, start, end)
        handler = self._handlers.get(type(body))
        if handler is None:
            raise PeerProtocolError(f"unexpected {type(body).__name__} frame from a relay")
        handler(link, body)
        return True

    def _on_declare(self, link: Link, declared: frames.Declare) -> None:
        far = declared.hop_class == HopClass.TO_WAN
        if not far and declared.hop_class not in (HopClass.MESH, HopClass.FROM_WAN):
            raise PeerProtocolError(f"hop class {declared.hop_class} is not allowed over a link")
        if bool(declared.site) != far or (far and declared.kind in _ANSWER_KINDS):
            raise PeerProtocolError("DECLARE must name a site with hop class TO_WAN, and only then")
        route = self._router.declare(link, declared)
        if far:
            route.barred = self._router.sites.barred(declared, printable(declared.site))

    def _on_pong(self, link: Link, pong: frames.Pong) -> None:
        self._router.drains.answered(link, pong, self._router.now_us)
        self._router.settling.answered(link, pong)

    def _on_topic(self, link: Link, topic: frames.Topic) -> None:
        check_named(check_topic, topic.name)
        self._router.audiences.asked_by_link(link, topic)

    def _on_beat(self, link: Link, beat: frames.Beat) -> None:
        link.beat_came(beat, self._router.now_us)
        self._router.peer_interest.beat(link, beat.version)

    def _on_gap(self, link: Link, gap: frames.Gap) -> None:
        if gap.kind not in (Kind.PUBLISH, Kind.BROADCAST):
            raise PeerProtocolError(
                f"GAP for frames of kind 0x{gap.kind:02x}; only PUBLISH and BROADCAST have gaps"
            )
        self._casts.gap_from_link(link, gap)

    def _on_left(self, link: Link, left: frames.CallerLeft) -> None:
        self._calls.leaving.callers_left(link, left, self._router.now_us)

    def _on_bye(self, link: Link, bye: frames.Bye) -> None:
        """Close the link after BYE: the relay stops, and has sent everything."""
        link.bye = True
        link.port.finish()
        self._router.link_down(link)

    def _on_error(self, link: Link, error: frames.Error) -> None:
        """Close the link after ERROR: the other relay reports which rule we broke."""
        link.port.abort(f"the other relay reported: {error.detail}")
        self._router.link_down(link)


class WanControl:
    """Handles the control frames of all WAN connections of one router. Texts in them are shown to people here."""

    def __init__(self, router: Parts, calls: Calls, casts: Casts) -> None:
        self._router = router
        self._calls = calls
        self._casts = casts
        self._handlers: dict[type, Callable[[Wan, Any], None]] = {
            link_frames.Interest: lambda wan, interest: self._router.federation.on_interest(
                wan, interest, self._router.now_us
            ),
            link_frames.Resync: lambda wan, _: self._router.federation.on_resync(
                wan, self._router.now_us
            ),
            frames.Declare: self._on_declare,
            frames.Beat: self._on_beat,
            frames.Gap: self._on_gap,
            frames.Fail: self._on_fail,
            frames.Credit: calls.answers.credited_by_link,
            frames.CallerLeft: self._on_left,
            frames.Roster: self._on_roster,
            frames.Done: self._on_done,
            frames.Ping: _on_ping,
            frames.Pong: lambda wan, pong: router.drains.answered(wan, pong, router.now_us),
            frames.Bye: self._on_bye,
            frames.Error: self._on_error,
        }

    def frame(self, wan: Wan, buf: memoryview, start: int, end: int) -> bool:
        """Handle one control frame, which may cost more than its length tells; raises PeerProtocolError."""
        wan.controlled_us = self._router.now_us
        body = decode_control(buf, start, end)
        handler = self._handlers.get(type(body))
        if handler is None:
            raise PeerProtocolError(f"unexpected {type(body).__name__} frame from a gateway")
        handler(wan, body)
        return True

    def _on_declare(self, wan: Wan, declared: frames.Declare) -> None:
        # What comes from another site stays in this one.
        if declared.hop_class != HopClass.TO_WAN:
            raise PeerProtocolError(
                f"hop class {declared.hop_class} is not allowed from another site"
            )
        if declared.site != self._router.site:
            raise PeerProtocolError(
                f"DECLARE for site {declared.site!r} arrived at site {self._router.site!r}"
            )
        route = self._router.declare(wan, declared)
        if declared.kind not in _ANSWER_KINDS:
            route.barred = self._router.federation.barred(declared, wan.site)

    def _on_beat(self, wan: Wan, beat: frames.Beat) -> None:
        wan.beat_came(beat, self._router.now_us)
        self._router.federation.beat(wan, beat.version, self._router.now_us)

    def _on_gap(self, wan: Wan, gap: frames.Gap) -> None:
        if gap.kind not in (Kind.PUBLISH, Kind.BROADCAST):
            raise PeerProtocolError(
                f"GAP for frames of kind 0x{gap.kind:02x}; only PUBLISH and BROADCAST have gaps"
            )
        if gap.site != self._router.site:
            raise PeerProtocolError(
                f"GAP for site {gap.site!r} arrived at site {self._router.site!r}"
            )
        if gap.count and not self._router.sites.policy.entering(gap.kind, gap.name, gap.key_id):
            cause = printable(gap.cause)
            self._casts.gap_from_wan(
                wan, msgspec.structs.replace(gap, cause=cause), self._router.now_us
            )

    def _on_left(self, wan: Wan, left: frames.CallerLeft) -> None:
        self._calls.leaving.callers_left(wan, left, self._router.now_us)

    def _on_fail(self, wan: Wan, fail: frames.Fail) -> None:
        # Another site's text is shown to people here.
        self._calls.answers.failed_by_link(
            wan, msgspec.structs.replace(fail, detail=printable(fail.detail))
        )

    def _on_roster(self, wan: Wan, roster: frames.Roster) -> None:
        members = [printable(member) for member in roster.members]
        self._calls.surveys.roster(wan, frames.Roster(roster.hop, members))

    def _on_done(self, wan: Wan, done: frames.Done) -> None:
        self._calls.surveys.done(wan, frames.Done(done.hop, [printable(m) for m in done.lost]))

    def _on_bye(self, wan: Wan, bye: frames.Bye) -> None:
        """Close the connection after BYE: the gateway stops, and has sent everything."""
        wan.bye = True
        wan.port.finish()
        self._router.wan_down(wan)

    def _on_error(self, wan: Wan, error: frames.Error) -> None:
        """Close the connection after ERROR: the other gateway reports which rule we broke."""
        wan.port.abort(f"the other gateway reported: {printable(error.detail)}")
        self._router.wan_down(wan)


def _on_ping(neighbor: Neighbor, ping: frames.Ping) -> None:
    """Answer a PING of a relay that stops. All that we sent before arrives before this answer."""
    neighbor.control(frames.Pong(ping.id))
