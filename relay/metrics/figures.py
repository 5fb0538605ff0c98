"""The metrics of a relay and its store, made from the relay's status (`iris status --json`).

Those of streams come from the store (`relay.store.figures`). The others hold nothing that the status does not, so the
relay does no work for them until it is asked.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from iris.metrics.page import OTHER, Names, Page, Spec

MAX_CLUSTERS: Final = 200
MAX_PROGRAMS: Final = 100
MAX_RECEIVERS: Final = 100
MAX_HOSTS: Final = 100
MAX_SITES: Final = 64
MAX_STREAMS: Final = 200
MAX_CONSUMERS: Final = 200
MAX_WORDS: Final = 64
"""Limit of causes and of reasons, whose words are Iris's own."""
MAX_RULES: Final = 256
"""Limit of rates and of rules of export and import, which the operator chooses."""

ACCOUNT: Final = ("in", "copied", "out", "unwanted", "refused", "expired")

SPECS: Final = (
    Spec("iris_relay_up", "1 if the relay answered, else 0; then there are no other metrics of it."),
    Spec("iris_relay_info", "Always 1; the labels are the relay's id and site, and the version of Iris.", ("relay", "site", "version")),
    Spec("iris_relay_limited", "1 if the report was too long, so that tables of programs, clusters and links are left out."),
    Spec("iris_relay_draining", "1 while the relay stops."),
    Spec("iris_relay_messages_in_total", "Messages received from programs, linked relays and gateways."),
    Spec("iris_relay_messages_copied_total", "Messages added because they go to several receivers."),
    Spec("iris_relay_messages_out_total", "Messages written to the connections of receivers."),
    Spec("iris_relay_messages_unwanted_total", "Publications and broadcasts that nobody subscribes to, or no member receives. This is not a fault."),
    Spec("iris_relay_messages_refused_total", "Calls that the relay ended with an error, which their sender got."),
    Spec("iris_relay_messages_dropped_total", "Messages lost at the relay, by cause.", ("cause",)),
    Spec("iris_relay_messages_expired_total", "Calls whose deadline passed before a member started them."),
    Spec("iris_relay_messages_held", "Messages that wait in the relay now."),
    Spec("iris_relay_queued_bytes", "Bytes in all queues of the relay."),
    Spec("iris_relay_queue_limit_bytes", "Limit of iris_relay_queued_bytes (queue_bytes)."),
    Spec("iris_relay_queue_full_frames_total", "Frames that arrived while all queues together were full."),
    Spec("iris_relay_queue_shed_messages_total", "Queued messages that were dropped to make room for others."),
    Spec("iris_relay_parked_calls", "Calls that wait for a relay or for members to come back."),
    Spec("iris_relay_parked_bytes", "Bytes of the calls that wait."),
    Spec("iris_relay_parked_limit_bytes", "Limit of iris_relay_parked_bytes."),
    Spec("iris_relay_parked_refused_total", "Calls that could not wait, because this limit was reached."),
    Spec("iris_relay_publishers_waiting", "Topics whose publishers wait for full subscribers."),
    Spec("iris_relay_publishers_unlimited_total", "Topics that were published without waiting, because too many of their session had no credit."),
    Spec("iris_relay_table_entries", "Entries of a table: sessions, members, subscriptions or watches.", ("table",)),
    Spec("iris_relay_table_limit", "Limit of a table.", ("table",)),
    Spec("iris_relay_table_refused_total", "Entries refused at the limit of a table, or at a user's share of it.", ("table",)),
    Spec("iris_relay_rate_refused_messages_total", "Messages refused or dropped over session_rate or an address_rate.", ("rate",)),
    Spec("iris_relay_clusters", "Clusters with members at this relay."),
    Spec("iris_relay_cluster_members", "Members at this relay, by cluster.", ("cluster",)),
    Spec("iris_relay_program_sessions", "Sessions, by the name that the program gives itself.", ("program",)),
    Spec("iris_relay_program_calls_running", "Calls sent to sessions of a program that have not ended.", ("program",)),
    Spec("iris_relay_program_calls_waiting", "Calls of a program that wait for an answer.", ("program",)),
    Spec("iris_relay_program_tunnels", "Open tunnels that a program takes part in.", ("program",)),
    Spec("iris_relay_program_messages_held", "Messages queued for a program, because it does not read fast enough.", ("program",)),
    Spec("iris_relay_slow_receivers", "Programs and links for which messages were dropped; at most 64 are known."),
    Spec("iris_relay_slow_receiver_dropped_messages_total", "Messages dropped for a slow program or link, by its name.", ("receiver", "kind")),
    Spec("iris_relay_reported_total", "Messages that programs report to have lost, and calls of their handlers that raised, by cause.", ("cause",)),
    Spec("iris_relay_program_reported_total", "The same, by the name that the program gives itself.", ("program", "cause")),
    Spec("iris_relay_session_protocol_errors_total", "Sessions closed because they broke the protocol."),
    Spec("iris_relay_sessions_turned_away_total", "Sessions refused because max_sessions, or a user's share of it, was reached."),
    Spec("iris_relay_sessions_refused_total", "Sessions from other hosts that were refused, by reason.", ("reason",)),
    Spec("iris_relay_web_connections", "Connections of browsers."),
    Spec("iris_relay_web_half_open", "Connections of browsers that have not sent their HELLO yet."),
    Spec("iris_relay_web_refused_total", "Connections of browsers that were refused, by reason.", ("reason",)),
    Spec("iris_relay_web_tickets_denied_total", "What tickets did not allow to sessions of browsers, by verb.", ("verb",)),
    Spec("iris_relay_web_tickets_ended_total", "Sessions of browsers that ended with their ticket, by reason.", ("reason",)),
    Spec("iris_relay_links", "Links to other relays that are up."),
    Spec("iris_relay_links_suspended", "Links that were lost a moment ago, whose relay may come back."),
    Spec("iris_relay_links_unreached", "Known relays that are not linked: the last attempt to reach them failed."),
    Spec("iris_relay_links_refused_total", "Connections of other relays that were refused, by reason.", ("reason",)),
    Spec("iris_relay_link_protocol_errors_total", "Links closed because the other relay broke the protocol."),
    Spec("iris_relay_link_rtt_seconds", "Round trip to a linked relay, by host.", ("host",)),
    Spec("iris_relay_link_clock_offset_seconds", "Difference between the clock of a linked relay and ours, without a sign, by host.", ("host",)),
    Spec("iris_relay_link_frames_total", "Frames over links, by host and direction (in, out). A link that comes back starts at 0.", ("host", "direction")),
    Spec("iris_relay_link_received_bytes_total", "Bytes received over links, by host. A link that comes back starts at 0.", ("host",)),
    Spec("iris_relay_link_queued_bytes", "Bytes queued for a linked relay, by host.", ("host",)),
    Spec("iris_relay_link_messages_held", "Messages queued for a linked relay, by host.", ("host",)),
    Spec("iris_relay_link_entries_refused_total", "Entries of a linked relay that were over a limit, by host.", ("host",)),
    Spec("iris_relay_link_calls_refused_total", "Calls over a link that were over their sender's share, by host.", ("host",)),
    Spec("iris_relay_away", "Relays and sites lost in the last hour that are not back."),
    Spec("iris_relay_losses_unreported_total", "Losses over links that are not reported, because too many senders were affected."),
    Spec("iris_relay_sites", "Other sites that are connected."),
    Spec("iris_relay_sites_suspended", "Sites that were lost a moment ago."),
    Spec("iris_relay_sites_unreached", "Sites in peer_site that are not connected."),
    Spec("iris_relay_site_rtt_seconds", "Shortest round trip to another site.", ("site",)),
    Spec("iris_relay_site_ways", "Connections of gateways that lead to another site.", ("site",)),
    Spec("iris_relay_sites_refused_total", "Messages and entries of other sites that export or import forbids, by reason.", ("reason",)),
    Spec("iris_relay_gateways_refused_total", "Connections of other sites' gateways that were refused, by reason.", ("reason",)),
    Spec("iris_relay_gateway_frames_total", "Frames over connections of this gateway, by site and direction (in, out).", ("site", "direction")),
    Spec("iris_relay_gateway_bytes_total", "Encrypted bytes over connections of this gateway, by site and direction (in, out).", ("site", "direction")),
    Spec("iris_relay_gateway_retransmit_ratio", "Share of TCP segments that were sent again (0 to 1): the worst connection, by site.", ("site",)),
    Spec("iris_relay_direct_tunnels", "Direct tunnels that are open."),
    Spec("iris_relay_direct_tunnels_limit", "Limit of direct tunnels (max_direct_tunnels)."),
    Spec("iris_relay_direct_tunnels_made_total", "Direct tunnels made."),
    Spec("iris_relay_direct_tunnels_refused_total", "Tunnels that stayed with the relay, by reason.", ("reason",)),
    Spec("iris_relay_direct_records_total", "Records of direct tunnels as their ends report them, by direction (sent, received).", ("direction",)),
    Spec("iris_relay_direct_bytes_total", "Bytes of direct tunnels as their ends report them, by direction (sent, received).", ("direction",)),
    Spec("iris_store_up", "1 if the store of this relay runs and can serve; absent without a store."),
    Spec("iris_store_starts_total", "How often the relay has started its store."),
    Spec("iris_store_streams", "Streams of this store."),
    Spec("iris_store_stream_messages", "Messages that a stream holds.", ("stream",)),
    Spec("iris_store_stream_bytes", "Bytes that a stream holds.", ("stream",)),
    Spec("iris_store_stream_oldest_offset", "Offset of the oldest message of a stream.", ("stream",)),
    Spec("iris_store_stream_end_offset", "Offset that the next message of a stream will have.", ("stream",)),
    Spec("iris_store_stream_appended_messages_total", "Messages that a stream has been given since it was made, by their offsets.", ("stream",)),
    Spec("iris_store_stream_lost_messages_total", "Messages that could not be recorded since the store started.", ("stream",)),
    Spec("iris_store_stream_failed", "1 if a stream cannot be written or read; of `other`, how many cannot.", ("stream",)),
    Spec("iris_store_stream_dead_letters_kept", "Dead letters of the consumers of a stream that are kept.", ("stream",)),
    Spec("iris_store_stream_dead_letters_total", "Dead letters that the consumers of a stream have stored since it was made.", ("stream",)),
    Spec("iris_store_consumer_lag_messages", "Messages that a consumer has not settled.", ("stream", "consumer")),
    Spec("iris_store_consumer_pending_messages", "Messages that workers of a consumer hold.", ("stream", "consumer")),
    Spec("iris_store_consumer_workers", "Workers that hold messages of a consumer, or wait for some.", ("stream", "consumer")),
    Spec("iris_store_bucket_up", "1 if the bucket of the store answers; absent without a bucket."),
    Spec("iris_store_bucket_backlog_bytes", "Bytes that wait for the bucket; what is in them is not acknowledged yet."),
    Spec("iris_store_bucket_backlog_limit_bytes", "Limit of the backlog of one journal, at which its streams accept nothing new."),
    Spec("iris_store_bucket_local_bytes", "Bytes of records of streams in the bucket that are on the store's disk."),
    Spec("iris_store_bucket_moved_bytes", "Bytes of their older records that are in segment objects of the bucket alone."),
    Spec("iris_store_bucket_reads_total", "Requests to the bucket for chunks of segment objects."),
    Spec("iris_store_bucket_read_hits_total", "Chunks of segment objects that were in memory when they were asked for."),
)  # fmt: skip
_OF_A_BUCKET: Final = (
    "bucket_local_bytes", "bucket_moved_bytes", "bucket_reads_total", "bucket_read_hits_total",
)  # fmt: skip


class Labels:
    """The names that have series of their own, from one page to the next."""

    def __init__(self) -> None:
        self.clusters = Names(MAX_CLUSTERS)
        self.programs = Names(MAX_PROGRAMS)
        self.receivers = Names(MAX_RECEIVERS)
        self.hosts = Names(MAX_HOSTS)
        self.sites = Names(MAX_SITES)
        self.streams = Names(MAX_STREAMS)
        self.consumers = Names(MAX_CONSUMERS)
        self.causes = Names(MAX_WORDS)
        self.reasons = Names(MAX_WORDS)
        self.verbs = Names(MAX_WORDS)
        self.rules = Names(MAX_RULES)


def fill(page: Page, report: Mapping[str, Any], labels: Labels, version: str) -> None:
    """Set the metrics of a relay from its status. What a report does not have stays without values."""
    page.set("iris_relay_up", 1)
    page.set("iris_relay_info", 1, report["relay"], report["site"], version)
    page.set("iris_relay_limited", "limited" in report)
    page.set("iris_relay_draining", report["draining"])
    account = report["accounts"]
    for word in ACCOUNT:
        page.set(f"iris_relay_messages_{word}_total", account[word])
    page.add_all("iris_relay_messages_dropped_total", account["dropped"], labels.causes)
    page.set("iris_relay_messages_held", account["held"])
    page.add_all("iris_relay_reported_total", report["troubles"]["totals"], labels.causes)
    counts = report.get("counts", {})
    page.set("iris_relay_links", counts.get("links", len(report["links"])))
    page.set("iris_relay_sites", counts.get("sites", len(report.get("sites", ()))))
    if "limited" in report:
        page.set("iris_relay_table_entries", counts["sessions"], "sessions")
        page.set("iris_relay_clusters", counts["clusters"])
        return
    _tables(page, report, labels)
    _programs(page, report, labels)
    _links(page, report, labels)
    _sites(page, report, labels)
    _direct(page, report["direct"], labels)
    if "store" in report:
        store = report["store"]
        page.set("iris_store_up", store["pid"] is not None and not store["cannot_serve"])
        page.set("iris_store_starts_total", store["starts"])


def _tables(page: Page, report: Mapping[str, Any], labels: Labels) -> None:
    queues, quotas = report["queues"], dict(report["quotas"])
    page.set("iris_relay_queued_bytes", queues["bytes"])
    page.set("iris_relay_queue_limit_bytes", queues["limit_bytes"])
    page.set("iris_relay_queue_full_frames_total", queues["full"])
    page.set("iris_relay_queue_shed_messages_total", queues["shed"])
    parked = quotas.pop("parked_bytes")
    page.set("iris_relay_parked_calls", report["parked"])
    page.set("iris_relay_parked_bytes", parked["held"])
    page.set("iris_relay_parked_limit_bytes", parked["limit"])
    page.set("iris_relay_parked_refused_total", parked["refused"])
    page.set("iris_relay_publishers_waiting", report["publishers_waiting"])
    page.set("iris_relay_publishers_unlimited_total", report["publishers_unlimited"])
    for name, table in (("sessions", report["users"]), *quotas.items()):
        page.set("iris_relay_table_entries", table["held"], name)
        page.set("iris_relay_table_limit", table["limit"], name)
        page.set("iris_relay_table_refused_total", table["refused"], name)
    for name, rate in report["rates"].items():
        page.add("iris_relay_rate_refused_messages_total", rate["refused"], labels.rules(name))


def _programs(page: Page, report: Mapping[str, Any], labels: Labels) -> None:
    page.set("iris_relay_clusters", len(report["clusters"]) + report["clusters_not_shown"])
    for name, by_key in report["clusters"].items():
        page.add("iris_relay_cluster_members", sum(by_key.values()), labels.clusters(name))
    for session in report["sessions"]:
        program = labels.programs(session["label"])
        page.add("iris_relay_program_sessions", 1, program)
        page.add("iris_relay_program_calls_running", session["running"], program)
        page.add("iris_relay_program_calls_waiting", session["waiting"], program)
        page.add("iris_relay_program_tunnels", session["tunnels"], program)
        page.add("iris_relay_program_messages_held", session["held"], program)
    for label, sums in report["troubles"]["programs"].items():
        program = labels.programs(label)
        for cause, count in sums.items():
            page.add("iris_relay_program_reported_total", count, program, labels.causes(cause))
    page.set("iris_relay_slow_receivers", len(report["slow"]))
    for slow in report["slow"]:
        kind = "link" if slow["link"] else "program"
        page.add(
            "iris_relay_slow_receiver_dropped_messages_total",
            slow["dropped"],
            labels.receivers(slow["label"]),
            kind,
        )
    page.set("iris_relay_session_protocol_errors_total", report["protocol_errors"])
    page.set("iris_relay_sessions_turned_away_total", report["turned_away"])
    refused = report.get("sessions_refused", {})
    page.add_all("iris_relay_sessions_refused_total", refused, labels.reasons)
    if web := report.get("web"):
        page.set("iris_relay_web_connections", web["connections"])
        page.set("iris_relay_web_half_open", web["half_open"])
        page.add_all("iris_relay_web_refused_total", web["refused"], labels.reasons)
        tickets = web["tickets"] or {}
        page.add_all("iris_relay_web_tickets_denied_total", tickets.get("denied", {}), labels.verbs)
        page.add_all("iris_relay_web_tickets_ended_total", tickets.get("ended", {}), labels.reasons)


def _links(page: Page, report: Mapping[str, Any], labels: Labels) -> None:
    page.set("iris_relay_links_suspended", len(report["suspended"]))
    page.set("iris_relay_away", report["away"])
    page.set("iris_relay_losses_unreported_total", report["casts_untold"])
    page.set("iris_relay_link_protocol_errors_total", report.get("link_protocol_errors"))
    page.add_all("iris_relay_links_refused_total", report.get("links_refused", {}), labels.reasons)
    if "dialling" in report:
        unlinked = report["dialling"]["unlinked"]
        page.set("iris_relay_links_unreached", sum(bool(target["error"]) for target in unlinked))
    for link in report["links"]:
        host = labels.hosts(link["label"])
        page.raise_to("iris_relay_link_rtt_seconds", link["rtt_us"] / 1e6, host)
        if link["clock_offset_us"] is not None:
            offset_s = abs(link["clock_offset_us"]) / 1e6
            page.raise_to("iris_relay_link_clock_offset_seconds", offset_s, host)
        page.add("iris_relay_link_frames_total", link.get("in_frames"), host, "in")
        page.add("iris_relay_link_frames_total", link.get("out_frames"), host, "out")
        page.add("iris_relay_link_received_bytes_total", link.get("in_bytes"), host)
        page.add("iris_relay_link_queued_bytes", link.get("queued_bytes"), host)
        page.add("iris_relay_link_messages_held", link["held"], host)
        page.add("iris_relay_link_entries_refused_total", link["untaken"], host)
        page.add("iris_relay_link_calls_refused_total", link["over_share"], host)


def _sites(page: Page, report: Mapping[str, Any], labels: Labels) -> None:
    page.set("iris_relay_sites_suspended", len(report["sites_suspended"]))
    page.add_all("iris_relay_sites_refused_total", report["sites_refused"], labels.rules)
    for site in report["sites"]:
        name = labels.sites(site["site"])
        page.raise_to("iris_relay_site_rtt_seconds", site["rtt_us"] / 1e6, name)
        page.add("iris_relay_site_ways", len(site["ways"]), name)
    gateways = report.get("gateways")
    if gateways is None:
        return
    reached = {site["site"] for site in report["sites"] if site["ways"]}
    unreached = sum(peer["site"] not in reached for peer in gateways["peers"])
    page.set("iris_relay_sites_unreached", unreached)
    page.add_all("iris_relay_gateways_refused_total", gateways["refused"], labels.reasons)
    for connection in gateways["connections"]:
        name = labels.sites(connection["site"])
        for direction in ("in", "out"):
            frames, size = connection[f"{direction}_frames"], connection[f"{direction}_bytes"]
            page.add("iris_relay_gateway_frames_total", frames, name, direction)
            page.add("iris_relay_gateway_bytes_total", size, name, direction)
        page.raise_to("iris_relay_gateway_retransmit_ratio", connection.get("loss"), name)


def _direct(page: Page, direct: Mapping[str, Any], labels: Labels) -> None:
    page.set("iris_relay_direct_tunnels", direct["open"])
    page.set("iris_relay_direct_tunnels_limit", direct["limit"])
    page.set("iris_relay_direct_tunnels_made_total", direct["made"])
    page.add_all("iris_relay_direct_tunnels_refused_total", direct["refused"], labels.reasons)
    for direction in ("sent", "received"):
        page.set("iris_relay_direct_records_total", direct[f"{direction}_records"], direction)
        page.set("iris_relay_direct_bytes_total", direct[f"{direction}_bytes"], direction)


def fill_store(page: Page, figures: Mapping[str, Any], labels: Labels) -> None:
    """Set the metrics of a store from the figures that it sends (`relay.store.figures`)."""
    page.set("iris_store_streams", figures["count"])
    for row in figures["streams"]:
        name, messages, size, oldest, following, lost, failed, dead, dead_ever = row
        name = labels.streams(name) if name != OTHER else OTHER
        page.add("iris_store_stream_messages", messages, name)
        page.add("iris_store_stream_bytes", size, name)
        if name != OTHER:  # of several streams they mean nothing
            page.raise_to("iris_store_stream_oldest_offset", oldest, name)
            page.raise_to("iris_store_stream_end_offset", following, name)
        page.add("iris_store_stream_appended_messages_total", following, name)
        page.add("iris_store_stream_lost_messages_total", lost, name)
        page.add("iris_store_stream_failed", failed, name)
        page.add("iris_store_stream_dead_letters_kept", dead, name)
        page.add("iris_store_stream_dead_letters_total", dead_ever, name)
    for stream, consumer, lag, pending, workers in figures["consumers"]:
        # The pair takes one place, or a stream with many consumers would have many times the limit.
        both = labels.consumers(f"{stream}\0{consumer}") if consumer != OTHER else OTHER
        pair = (OTHER, OTHER) if both == OTHER else (stream, consumer)
        page.add("iris_store_consumer_lag_messages", lag, *pair)
        page.add("iris_store_consumer_pending_messages", pending, *pair)
        page.add("iris_store_consumer_workers", workers, *pair)
    bucket = figures["bucket"]
    if bucket is not None:
        up, backlog, limit, *others = bucket
        page.set("iris_store_bucket_up", up)
        page.set("iris_store_bucket_backlog_bytes", backlog)
        page.set("iris_store_bucket_backlog_limit_bytes", limit)
        for name, value in zip(_OF_A_BUCKET, others, strict=False):
            page.set(f"iris_store_{name}", value)
