"""Relays, links, sites, programs and drops, from the statuses of the relays that were asked."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Final

from iris.watch.history import History
from iris.watch.network import MAX_RELAYS, Drop, Link, Program, Relay, Site, Trouble, called
from iris.watch.sample import RelayAnswer, number, sentence, text, whole

RATES: Final = ("in", "out", "unwanted", "refused", "expired")
MAX_NAMES: Final = 16
"""Names that are taken from one row of troubles."""
UNSEEN: Final = ("queue full", "unread")
"""Causes of losses that no relay has counted as drops."""
FAILED: Final = "handler failed"
UNCOUNTED: Final = "uncounted"
GONE_S: Final = 600.0
"""For how long a relay is shown after its link was lost."""


@dataclass(slots=True)
class Relays:
    """What the statuses of one sample say."""

    relays: dict[str, Relay] = field(default_factory=dict)
    """Id -> relay; those without an id have their address for a key."""
    links: list[Link] = field(default_factory=list)
    sites: dict[str, Site] = field(default_factory=dict)
    programs: list[Program] = field(default_factory=list)
    drops: list[Drop] = field(default_factory=list)
    clusters: dict[str, tuple[int, dict[str, int]]] = field(default_factory=dict)
    """Cluster -> (members in the site, members at relays that were asked by the first digits of their key ids)."""
    troubles: list[tuple[Relay, Trouble]] = field(default_factory=list)
    lately_slow: list[tuple[Relay, dict[str, Any]]] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    def add_cluster(self, name: str, count: int, keys: dict[str, int]) -> None:
        """Add what one relay says of a cluster. Relays of one site count the same members."""
        known, known_keys = self.clusters.get(name, (0, {}))
        for key, members in keys.items():
            known_keys[key] = known_keys.get(key, 0) + members
        self.clusters[name] = max(known, count), known_keys

    def hears(self, relay: str) -> bool:
        """Whether programs of a relay report to us what they lose, because it was asked and names them."""
        known = self.relays.get(relay)
        return known is not None and known.asked and known.state != "away" and not known.limited

    def host_of(self, relay: str) -> str:
        """Return the name of the host of a relay; the first digits of its id if it is not known."""
        known = self.relays.get(relay)
        return known.host if known is not None and known.host else relay[:8]


class RelayReader:
    """Reads statuses one after the other, and remembers relays that are gone."""

    def __init__(self, history: History) -> None:
        self._history = history
        self._names: dict[str, tuple[str, str, str]] = {}
        """Address -> (id, host, site) of the relay that answered there last."""
        self._linked: dict[str, Relay] = {}
        """Relays that were linked in the sample before, by id."""
        self._gone: dict[str, tuple[Relay, float]] = {}
        """Id -> a relay whose link was lost, and when. Another relay of its host takes its place."""

    def read(self, answers: list[RelayAnswer], now_s: float) -> Relays:
        """Return what the relays of one sample say."""
        found = Relays()
        for answer in answers:
            try:
                self._read(answer, found)
            except (KeyError, TypeError, ValueError, AttributeError) as err:
                found.problems.append(
                    sentence(f"relay {answer.address}: cannot read its status: {type(err).__name__}: {err}")
                )  # fmt: skip
        self._add_linked(found, now_s)
        return found

    def _read(self, answer: RelayAnswer, found: Relays) -> None:
        report = answer.report
        if report is None:
            relay_id, host, site = self._names.get(answer.address, ("", answer.host, ""))
            key = relay_id or answer.address
            found.relays[key] = Relay(
                id=relay_id, host=host, site=site, address=text(answer.address), state="away", asked=True,
                error=sentence(answer.error),
            )  # fmt: skip
            found.problems.append(sentence(f"relay {answer.address}: {answer.error}"))
            return
        relay = self._relay(answer, report)
        before, *_ = self._names.get(answer.address, ("",))
        if before != relay.id:  # the relay of this address began again, under another id
            self._linked.pop(before, None)
            self._gone.pop(before, None)
        self._names[answer.address] = relay.id, relay.host, relay.site
        found.relays[relay.id] = relay
        found.sites.setdefault(relay.site, Site(name=relay.site, own=True))
        found.drops += self._drops(relay, report)
        found.links += self._links(relay, report)
        for row in self._sites(report):
            known = found.sites.get(row.name)
            if known is None or (row.rtt_ms or 0) < (known.rtt_ms or 0):
                found.sites[row.name] = row
        troubles = list(self._troubles(relay, report))
        found.troubles += [(relay, each) for each in troubles]
        found.drops += [_as_drop(each) for each in troubles if each.cause in UNSEEN]
        found.programs += self._programs(relay, report, troubles)
        found.lately_slow += [(relay, slow) for slow in report.get("slow", ())]
        linked = report.get("linked_clusters", {})
        for name, by_key in report.get("clusters", {}).items():
            keys = {str(key): whole(count) for key, count in by_key.items()}
            found.add_cluster(str(name), sum(keys.values()) + whole(linked.get(name, 0)), keys)
        for name, count in linked.items():
            found.add_cluster(str(name), whole(count), {})

    def _relay(self, answer: RelayAnswer, report: dict[str, Any]) -> Relay:
        relay_id, account = str(report["relay"]), report["accounts"]
        up_s = number(report["uptime_s"]) if "uptime_s" in report else None
        rates = {
            word: self._history.rate(("relay", relay_id, word), whole(account[word]), up_s)
            for word in RATES
        }  # fmt: skip
        dropped = sum(whole(count) for count in account["dropped"].values())
        queues, counts = report.get("queues", {}), report.get("counts", {})
        return Relay(
            id=text(relay_id), host=text(report.get("host") or answer.host), site=text(report.get("site", "")),
            address=text(answer.address), state="draining" if report["draining"] else "up", asked=True,
            limited="limited" in report, uptime_s=up_s, in_rate=rates["in"], out_rate=rates["out"],
            unwanted_rate=rates["unwanted"], refused_rate=rates["refused"], expired_rate=rates["expired"],
            account={word: whole(account[word]) for word in ("in", "copied", "out", "unwanted", "refused", "expired", "held")} | {"dropped": dropped},
            dropped_rate=self._history.rate(("relay", relay_id, "dropped"), dropped, up_s),
            held=whole(account["held"]),
            queued_bytes=whole(queues["bytes"]) if queues else None,
            queue_limit_bytes=whole(queues["limit_bytes"]) if queues else None,
            sessions=whole(counts.get("sessions", len(report["sessions"]))),
            links=whole(counts.get("links", len(report["links"]))),
        )  # fmt: skip

    def _drops(self, relay: Relay, report: dict[str, Any]) -> Iterator[Drop]:
        for cause, count in report["accounts"]["dropped"].items():
            rate = self._history.rate(
                ("drop", relay.id, cause), whole(count), number(report.get("uptime_s", 0))
            )
            yield Drop(
                where=f"relay {relay.host}", host=relay.host, cause=text(cause), rate=rate, total=whole(count)
            )  # fmt: skip

    def _links(self, relay: Relay, report: dict[str, Any]) -> Iterator[Link]:
        up_s = number(report.get("uptime_s", 0))
        for link in report["links"]:
            peer = text(link["peer"])
            rate = {
                name: self._history.rate(("link", relay.id, peer, name), whole(link.get(name, 0)), up_s)
                for name in ("in_frames", "out_frames", "in_bytes")
            }  # fmt: skip
            offset = link.get("clock_offset_us")
            yield Link(
                relay=relay.id, relay_host=relay.host, peer=peer, peer_host=text(link["label"]),
                address=text(link.get("address", "")), site=text(link.get("site", "")), rtt_ms=number(link["rtt_us"]) / 1000,
                in_rate=rate["in_frames"], out_rate=rate["out_frames"], in_bytes_rate=rate["in_bytes"],
                queued_bytes=whole(link.get("queued_bytes", 0)), held=whole(link["held"]), members=whole(link["members"]),
                clock_offset_ms=None if offset is None else number(offset) / 1000,
                clock_error_ms=None if offset is None else number(link.get("clock_error_us", 0)) / 1000,
            )  # fmt: skip
        for peer in report.get("suspended", ()):
            peer = text(peer)
            known = self._label(peer)
            yield Link(
                relay=relay.id, relay_host=relay.host, peer=peer, peer_host=known, state="suspended"
            )
        for target in report.get("dialling", {}).get("unlinked", ()):
            if target["error"]:
                yield Link(
                    relay=relay.id, relay_host=relay.host, peer="", peer_host="", address=text(target["source"]),
                    state="unlinked", error=sentence(target["error"]),
                )  # fmt: skip

    def _label(self, peer: str) -> str:
        return next((host for known, host, _ in self._names.values() if known == peer), "")

    @staticmethod
    def _sites(report: dict[str, Any]) -> Iterator[Site]:
        connections = report.get("gateways", {}).get("connections", ())
        reached = set()
        for site in report.get("sites", ()):
            if site["ways"]:
                reached.add(site["site"])
            lost = [
                number(c["loss"]) for c in connections if c["site"] == site["site"] and "loss" in c
            ]
            yield Site(
                name=text(site["site"]), rtt_ms=number(site["rtt_us"]) / 1000, loss=max(lost, default=None),
                cost_ms=whole(site["cost_ms"]), ways=len(site["ways"]), clusters=whole(site["clusters"]),
                topics=whole(site["topics"]),
            )  # fmt: skip
        for name in report.get("sites_suspended", ()):
            yield Site(name=text(name), state="suspended")
        for peer in report.get("gateways", {}).get("peers", ()):
            if peer["site"] not in reached:
                yield Site(
                    name=text(peer["site"]), state="unlinked", cost_ms=whole(peer["cost_ms"])
                )

    def _troubles(self, relay: Relay, report: dict[str, Any]) -> Iterator[Trouble]:
        for each in report.get("troubles", {}).get("latest", ()):
            session, cause, total = (
                whole(each["session"]),
                text(each["cause"]),
                whole(each["count"]),
            )
            key = ("trouble", relay.id, session, cause)
            yield Trouble(
                host=relay.host, program=text(each["label"]), pid=whole(each["pid"]), session=session, cause=cause,
                names={text(name): whole(count) for name, count in [*each["names"].items()][:MAX_NAMES]},
                rate=self._history.rate(key, total, number(report.get("uptime_s", 0))), total=total,
                last_s=number(each["last_s"]),
            )  # fmt: skip

    def _programs(
        self, relay: Relay, report: dict[str, Any], troubles: list[Trouble]
    ) -> Iterator[Program]:
        lost: dict[int, int] = {}
        failed: dict[int, int] = {}
        for each in troubles:
            if each.cause == FAILED:
                failed[each.session] = each.total
            elif each.cause != UNCOUNTED:
                lost[each.session] = lost.get(each.session, 0) + each.total
        for session in report["sessions"]:
            counts = {
                name: whole(session[name])
                for name in ("members", "subscriptions", "running", "waiting", "tunnels", "held")
            }
            key = ("held", relay.id, session["session"])
            yield Program(
                relay=relay.id, host=relay.host, label=text(session["label"]), session=whole(session["session"]),
                pid=whole(session["pid"]), user=text(session.get("user", "") or ""),
                held_for_s=self._history.since(key, counts["held"] > 0), lost_messages=lost.get(session["session"], 0),
                failed=failed.get(session["session"], 0), **counts,
            )  # fmt: skip

    def _add_linked(self, found: Relays, now_s: float) -> None:
        """Add the relays that are known by links only, and those whose links were lost."""
        for link in found.links:
            known = found.relays.get(link.peer)
            if link.peer and (known is None or (not known.asked and link.state == "up")):
                before = self._linked.get(link.peer)
                host = link.peer_host or (before.host if before is not None else "")
                found.relays[link.peer] = Relay(
                    id=link.peer, host=host, site=link.site, state=link.state
                )
        if not any(relay.asked and relay.state == "up" for relay in found.relays.values()):
            found.relays = {**self._as_unknown(), **found.relays}
            return
        for relay_id, relay in found.relays.items():
            if relay_id in self._linked or not relay.id:
                continue
            back = [key for key, (gone, _) in self._gone.items() if gone.host == relay.host]
            for key in {relay_id, *back[:1]}:
                self._gone.pop(key, None)
        for relay_id, relay in self._linked.items():
            if relay_id not in found.relays and len(self._gone) < MAX_RELAYS:
                self._gone[relay_id] = relay, now_s
        self._linked = {key: relay for key, relay in found.relays.items() if relay.id}
        for relay_id, (relay, lost_s) in list(self._gone.items()):
            if now_s - lost_s > GONE_S or relay_id in found.relays:
                del self._gone[relay_id]
            else:
                found.relays[relay_id] = _away(
                    relay, f"its link was lost {now_s - lost_s:.0f} s ago"
                )

    def _as_unknown(self) -> dict[str, Relay]:
        """Return the relays of the sample before, of which nothing is known while no relay answers."""
        why = "no relay that was asked answers, so nothing is known of it"
        return {key: _away(relay, why) for key, relay in self._linked.items()}


def _as_drop(trouble: Trouble) -> Drop:
    names = f": {', '.join(trouble.names)}" if trouble.names else ""
    return Drop(
        where=text(f"program {called(trouble.program, trouble.pid)}"), host=trouble.host,
        cause=text(trouble.cause + names), rate=trouble.rate, total=trouble.total,
    )  # fmt: skip


def _away(relay: Relay, why: str) -> Relay:
    return Relay(
        id=relay.id,
        host=relay.host,
        site=relay.site,
        address=relay.address,
        state="away",
        error=why,
    )
