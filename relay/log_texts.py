"""The sentences of `--log-format text`: one for each event that relays, stores and bridges log.

A sentence says what happened, to what, why, and what to do if there is something to do. `{name}` stands for the
field `name`; fields that a sentence does not use are appended by `relay.logs.Sentences`. An event that is logged with
different fields has several sentences: the first one whose fields are all present is used. Events of the library have
theirs in `iris.log_texts`.
"""

from __future__ import annotations

from typing import Final

from iris import log_texts

_BUG: Final = "This is a bug in Iris: please report it with the traceback."

SENTENCES: Final[dict[str, str | tuple[str, ...]]] = {
    **log_texts.SENTENCES,
    # Start, settings and end of a relay
    "relay.started": "The relay {relay} (pid {pid}) started and accepts sessions at {socket}.",
    "relay.waits": "Before it was restarted, this relay had members (number: {members}, those of its store included; sessions: {sessions}). Calls that find no member wait up to {within_s} s for them to return.",
    "relay.returned": "As many members as before the restart ({members}) are back after {after_s} s.",
    "relay.missed": "The relay had {members} members before it was restarted; the number of members now is {here}, after {after_s} s. Calls that find no member are refused from now on.",
    "relay.settings_read": "The settings were read again. Changed: {changed}. Unchanged until the relay is restarted: {needs_restart}.",
    "relay.settings_unreadable": "The settings could not be read again, so the relay keeps the old ones: {error}. Correct them and send SIGHUP.",
    "relay.draining": "The relay is stopping and waits up to {within_s} s for its sessions to finish (number: {sessions}; {try}).",
    "relay.cut": "The relay stopped waiting after {after_s} s and ended {calls} calls and {tunnels} tunnels. Increase drain_timeout_s if they need longer.",
    "relay.unread": "The relay stopped waiting after {after_s} s for sessions that it had not read ({sessions}: {labels}). What they sent last may be lost; its receivers get a loss of unknown count.",
    "relay.stopped": "The relay {relay} stopped.",
    "settings.no_effect": "The setting {setting} has no effect any more. Remove it.",
    "attendance.not_kept": "The number of members could not be written to {path}: {error}. After a restart, calls will not wait for members to return.",
    "notify.failed": "The service manager at {address} (NOTIFY_SOCKET) could not be notified: {error}. The process continues.",
    "router.fault": f"Routing failed at a timer with an internal error and is tried again. {_BUG}",
    "port.fault": f"One connection was closed because of an internal error; the others continue. {_BUG}",
    # Sessions wait at a restart for the store and links
    "door.waits": "Waiting up to {within_s} s for what was connected before the restart (store: {store}, links: {links}) before accepting sessions.",
    "door.late": "Sessions are accepted after {after_s} s although not everything is back (store: {store}, links: {links} of {links_before}). Messages to what is missing are lost and reported as a loss of unknown count.",
    "door.not_kept": "The number of links could not be written to {path}: {error}. After a restart, sessions will not wait for these links.",
    "door.not_forgotten": "The store's note that its streams are complete could not be removed: {error}. Streams may lack messages without a reported gap; check the disk of the data directory.",
    # The store's process, as its relay sees it
    "store.not_started": "The store could not be started: {error}. The relay tries again.",
    "store.ended": "The store of {data} ended with exit code {exit}. The relay starts it again.",
    "store.killed": "The store (pid {pid}) did not end in time and was killed.",
    # The process that serves metrics
    "metrics.not_started": "The process that serves metrics could not be started: {error}. The relay tries again.",
    "metrics.ended": "The process that serves metrics ended with exit code {exit}. The relay starts it again.",
    "bridge.metrics": "Metrics of the bridge are served at http://{address}/metrics.",
    # Sessions
    "sessions.listening": "Sessions over TLS are accepted at {addresses}.",
    "sessions.no_descriptors": "A session was not accepted: {error}. Raise the limit of open files (LimitNOFILE= of systemd, or ulimit -n).",
    "sessions.full": "A session was refused because the relay or its user is at the limit: max_sessions is {max_sessions}, and user {user} has {of_this_user}. End sessions or raise max_sessions.",
    "session.not_attached": "A session was accepted but could not be set up: {error}.",
    "session.refused": "A session over TLS from {address} was refused: {reason}. Check its access file (iris key access).",
    "session.admitted": "Session {session} was admitted over TLS with access file {access}.",
    "session.aborted": "Session {session} was cut: {reason}.",
    "session.protocol_error": "The session of {label} (pid {pid}) broke the protocol and was closed: {error}. Check that its version of Iris fits this relay.",
    "session.slow": "{label} (pid {pid}, user {user}) reads too slowly: {dropped_lately} messages for it were dropped. Make its handlers faster or asynchronous, or share the work in a queue group.",
    "session.fault": f"Session {{session}} was cut because of an internal error; the others continue. {_BUG}",
    "tunnel.not_handed_over": "A tunnel stays with the relay because its socket pair could not be sent to a program: {error}.",
    # Links to other relays of the network
    "links.listening": "Links are accepted at {addresses}.",
    "links.another_port": "Port {taken} is in use, so links are accepted at port {port}. Other relays must name this one with --join HOST:{port}; or free port {taken} and restart.",
    "links.no_addresses": "The addresses of this host could not be listed: {error}. Until they can, peers do not get changed addresses.",
    "links.two_site_names": "Relay {peer} says that it is in site {its_site}, but this relay is in site {ours}. Start all relays of a network with the same --site.",
    "links.keys": "The network keys were read again. The relay now serves networks {networks}.",
    "links.keys_unreadable": "The network keys could not be read again, so the relay keeps the old ones: {error}. Correct the file and send SIGHUP.",
    "links.no_descriptors": "A link was not accepted: {error}. Raise the limit of open files (LimitNOFILE= of systemd, or ulimit -n).",
    "link.not_attached": "A link was accepted but could not be set up: {error}.",
    "link.refused": (
        "A link with {address} was refused: {reason} ({detail}).",
        "A link with {address} was refused: {reason}.",
    ),
    "link.not_reached": "The relay named by {source} could not be reached: {error}. This relay tries again.",
    "link.up": "The link to {label} ({address}, relay {peer}) is up.",
    "link.down": "The link to relay {peer} ({address}) is down: {reason}.",
    "link.replaced": "The link to relay {peer} at {old} was replaced by a newer one at {new}.",
    "link.dropped": "A connection with relay {peer} ({address}) was closed because it is not needed: {reason}.",
    "link.protocol_error": "Relay {peer} ({address}) broke the protocol and the link was closed: {error}. Check that its version fits this relay.",
    "link.slow": "The link to {label} is too slow: {dropped_lately} messages for it were dropped. Check the network and the load of that host.",
    "link.fault": f"The link with {{address}} was cut because of an internal error; the others continue. {_BUG}",
    "link.dial_fault": f"Dialling a relay failed with an internal error and is tried again. {_BUG}",
    # Connections to gateways of other sites
    "gateways.listening": "Gateways of other sites are accepted at {addresses}.",
    "gateways.no_descriptors": "A gateway was not accepted: {error}. Raise the limit of open files (LimitNOFILE= of systemd, or ulimit -n).",
    "gateway.not_attached": "A gateway was accepted but could not be set up: {error}.",
    "gateway.refused": (
        "A connection with the gateway at {address} was refused: {reason} ({detail}). Compare the settings and fingerprints of both sites.",
        "A connection with the gateway at {address} was refused: {reason}. Compare the settings and fingerprints of both sites.",
    ),
    "gateway.not_reached": "The gateway {source} could not be reached: {error}. This gateway tries again.",
    "gateway.up": "The connection to gateway {label} of site {site} ({address}) is up.",
    "gateway.down": "The connection to gateway {peer} ({address}) is down: {reason}.",
    "gateway.replaced": "The connection to gateway {peer} at {old} was replaced by a newer one at {new}.",
    "gateway.dropped": "A connection with gateway {peer} ({address}) was closed because it is not needed: {reason}.",
    "gateway.protocol_error": "Gateway {peer} ({address}) broke the protocol and its connection was closed: {error}. Check that its version fits this relay.",
    "gateway.fault": f"The connection with the gateway at {{address}} was cut because of an internal error; the others continue. {_BUG}",
    "gateway.dial_fault": f"Dialling a gateway failed with an internal error and is tried again. {_BUG}",
    # Discovery
    "discovery.announced": "This relay is advertised by multicast DNS: port {port} at {addresses}.",
    "discovery.sighted": "Discovery reported a relay at {addresses} (source: {source}, left: {gone}).",
    "discovery.nothing_found": "No other relay was found. Tried: {tried}. If there is one, name it: {try}.",
    "discovery.unresolved": "The --join entry {join} could not be resolved: {reason}. It is tried again.",
    "discovery.resolved": "The --join entry {join} resolves again, to {addresses}.",
    "discovery.failed": "Multicast discovery does not work ({what}): {error}. It is tried again; name relays with --join where multicast is not available.",
    "discovery.fault": (
        "Discovery ended with an internal error: {error}.",
        f"One way of discovery ended with an internal error; links that are up stay. {_BUG}",
    ),
    "discovery.zeroconf": "The multicast DNS library warned: {text}.",
    # The store
    "store.attached": "The store is attached to its relay and serves {streams} streams.",
    "store.detached": "The store is not attached to a relay any more: {reason}. It attaches again when a relay is running.",
    "store.reconnect": "The store could not attach to a relay: {error}. It tries again.",
    "store.cannot_serve": "The store cannot serve: {error}. It tries again until this is corrected.",
    "store.refused_by_relay": "The relay refused to record stream {stream}: {error}.",
    "store.call_refused": "A call to {address} was refused because it failed authentication: {reason}. Check the keyring of the caller.",
    "store.stream_created": "Stream {stream} ({uuid}) was created.",
    "store.stream_deleted": "Stream {stream} ({uuid}) was deleted.",
    "store.stream_promoted": "Stream {stream} ({uuid}), until now a mirror of {source}, was promoted.",
    "store.stream_reopened": "Stream {stream} works again.",
    "store.stream_failed": "Stream {stream} failed: {error}. The store opens it again as soon as that works.",
    "store.stream_quarantined": "The stream in {path} could not be opened and is not served: {error}. If it is damaged, stop the store and run iris store salvage.",
    "store.stream_refused": "The stream in {path} is not served because its definition is not valid: {error}.",
    "store.salvage_finished": "A salvage that was interrupted is finished: {path}.",
    "store.staged_expired": "{records} staged messages of stream {stream} were deleted because they were not committed in time.",
    "store.files_left": "Files of a deleted stream could not be removed: {path}: {error}. They are removed at the next start.",
    "store.bucket_opened": "The store writes journal {journal} in bucket {bucket}, with {streams} streams.",
    "store.bucket_not_opened": "The store cannot use its bucket: {error}. It tries again; its other streams are served.",
    "store.bucket_away": "The bucket does not answer: {error}. {waiting_bytes} bytes wait for it.",
    "store.bucket_behind": "The store stopped before bucket {bucket} had everything. What it lacks was not acknowledged, and follows at the next start.",
    "store.journal_taken": "Journal {journal} has passed to journal {by} of another store, which serves its streams.",
    "store.journal_lost": "{error}. This store serves those streams no more.",
    "store.peer_seen": "Another store, {store}, can be seen.",
    "store.took_over": "A store of bucket {bucket} is gone: {streams} streams of its journals {journals} are served here now.",
    "store.copy_damaged": "The copy in {path} cannot be opened and is made again from the bucket: {error}.",
    "store.clock_stepped": "The clock of this host was set by {by_s} s: {effect}.",
    "store.no_word_left": "The store could not note that its streams are complete: {error}. After the next start they will have a gap.",
    "store.fault": (
        f"A call to the store ({{call}}) failed with an internal error. {_BUG}",
        f"Work on stream {{stream}} failed with an internal error and is tried again. {_BUG}",
    ),
    # Bridges
    "bridge.started": "The bridge accepts clients at {listen} (addresses this host lacks: {absent}).",
    "bridge.no_authentication": "Clients at {listen} are not authenticated: {why}. Let only trusted programs reach these ports.",
    "bridge.stopped": "The bridge stopped.",
    "bridge.stuck": (
        "{clients} clients of the bridge did not finish in time and are disconnected.",
        "The sockets of the bridge did not close within {seconds} s and are abandoned.",
    ),
    "bridge.client": "Client {peer} is connected (cluster: {cluster}).",
    "bridge.client_left": "Client {peer} left ({ending}): {reason}.",
    "bridge.client_dropped": "Client {peer} was disconnected: {reason}.",
    "bridge.client_refused": "Client {peer} was refused: {reason}.",
    "bridge.subscribed": "Client {peer} subscribed to {topic}.",
    "bridge.counters": "Counts of the bridge so far: {counters}.",
    "bridge.keys_reloaded": (
        "The keyring was read again; {left_behind} clients keep the old keys.",
        "The keyring was read again for socket {socket}.",
        "The keyring was read again.",
    ),
    "bridge.keys_not_reloaded": (
        "The keyring could not be applied for client {peer}, which keeps the old keys: {error}.",
        "The keyring could not be applied for socket {socket}, which keeps the old keys: {error}.",
        "The keyring could not be read again, so the bridge keeps the old keys: {error}.",
        "The tokens or the keyring could not be read again, so the old ones stay in use: {error}. Correct the file and send SIGHUP.",
    ),
    "http.reads": "This bridge opens every message that it passes on: its memory and its HTTP connections have them in the clear. Run it where you would run a member of the clusters.",
    "http.serving": "The bridge serves HTTP at {address} (number of tokens: {tokens}).",
    "http.tokens_reloaded": "The tokens were read again (number: {tokens}). Event streams were ended, so that their clients connect again.",
    "http.stopped": "The bridge stopped after {requests} requests.",
    "bridge.fault": f"Client {{peer}} was disconnected because of an internal error; the others continue. {_BUG}",
    "bridge.tunnel_fault": f"A tunnel of the bridge was closed because of an internal error. {_BUG}",
    "bridge.open": "Socket {socket} is open at {url}.",
    "bridge.ready": "The bridge is ready: {sockets} sockets, pid {pid}.",
    "bridge.not_joined": "Socket {socket} could not join its cluster: {error}. It tries again.",
    "bridge.status": "Socket {socket} received {from_sp} messages from its {peers} peers and sent them {to_sp}; lost: {lost}.",
    "bridge.lost": "Socket {socket} lost messages: {cause}.",
    "bridge.failed": f"Socket {{socket}} ended with an error. {_BUG}",
}
