"""Iris: decentralized cluster messaging. Services talk to clusters by name, never to hosts.

    relay     the daemon on a host; finds its peers, routes by cluster name, cannot read a payload
    session   one process attached to its local relay
    member    a session that serves a cluster, having proved that it holds the key
    cluster   a name plus a key; the smallest unit that can be addressed
    topic     a dotted name to publish to; filters may hold '*' (one token) and a final '>' (the rest)
    keyring   a process's keys: per cluster, per topic prefix, and a default
    bundle    several messages for one address, sealed and framed as one
    tunnel    an ordered, throttled, two-way message stream between two members
    stream    a durable, offset-addressed log of a topic, a cluster or what is appended; kept, sealed, by a store
    batch     what many processes stage for a stream, in attempts, and one commits: it appears whole and once
    frame     what travels on the wire; message is what a user sends

    async with iris.connect() as client:
        reply = await client.request("databases", b"...", timeout=1.0)

(SciTools Iris, for Earth science, is imported by the same name: the two do not fit in one environment.)
"""

from iris.audience import Audience, SlowReceiver
from iris.client import Client, Scope, connect
from iris.config import ClientConfig, Limits
from iris.core.interfaces import Lost
from iris.core.message import Message
from iris.crypto.keyring import Keyring
from iris.crypto.keys import ClusterKey
from iris.errors import (
    AmbiguousStream,
    Closed,
    ConfigError,
    ConnectionLost,
    DecodeError,
    InvalidName,
    IrisError,
    KeyringError,
    MessageTooLarge,
    NoMembers,
    NoStream,
    OffsetConflict,
    Overloaded,
    RelayError,
    RelayUnavailable,
    RemoteError,
    RequestError,
    RequestTimeout,
    StagedMissing,
    StreamDamaged,
    StreamError,
    StreamExists,
    StreamUnavailable,
    TunnelBroken,
)
from iris.handlers import Deferred, Reply, Request
from iris.many import Outcome
from iris.membership import Members
from iris.service import Service
from iris.streams import (
    CommitInfo,
    StagedAttempt,
    Staging,
    StreamGap,
    StreamInfo,
    StreamMessage,
    StreamPage,
    StreamRecord,
)
from iris.subscription import Subscription
from iris.survey import Survey
from iris.tunnel import EndOfTunnel, Tunnel

__all__ = [
    "AmbiguousStream",
    "Audience",
    "Client",
    "ClientConfig",
    "Closed",
    "ClusterKey",
    "CommitInfo",
    "ConfigError",
    "ConnectionLost",
    "DecodeError",
    "Deferred",
    "EndOfTunnel",
    "InvalidName",
    "IrisError",
    "Keyring",
    "KeyringError",
    "Limits",
    "Lost",
    "Members",
    "Message",
    "MessageTooLarge",
    "NoMembers",
    "NoStream",
    "OffsetConflict",
    "Outcome",
    "Overloaded",
    "RelayError",
    "RelayUnavailable",
    "RemoteError",
    "Reply",
    "Request",
    "RequestError",
    "RequestTimeout",
    "Scope",
    "Service",
    "SlowReceiver",
    "StagedAttempt",
    "StagedMissing",
    "Staging",
    "StreamDamaged",
    "StreamError",
    "StreamExists",
    "StreamGap",
    "StreamInfo",
    "StreamMessage",
    "StreamPage",
    "StreamRecord",
    "StreamUnavailable",
    "Subscription",
    "Survey",
    "Tunnel",
    "TunnelBroken",
    "connect",
]
