"""The public names of `iris`, which `import iris` loads all at once when the first of them is used."""

from iris.audience import Audience, SlowReceiver
from iris.client import Client, connect
from iris.config import ClientConfig, Limits
from iris.core.faults import Refusal
from iris.core.interfaces import Loss
from iris.core.message import Message
from iris.crypto.keyring import Keyring
from iris.crypto.keys import ClusterKey
from iris.describing import Description, HandlerInfo, PerMember, Ping
from iris.errors import (
    AmbiguousStream,
    Closed,
    ConfigError,
    ConnectionLost,
    DecodeError,
    EncodeError,
    InvalidName,
    IrisError,
    KeyringError,
    MessageTooLarge,
    NoMembers,
    NoStream,
    NotActive,
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
    TooManyWorkers,
    TunnelBroken,
)
from iris.handlers import Deferred, Reply, Request
from iris.membership import Members
from iris.middleware import Call, CallNext, Middleware
from iris.request_many import Outcome
from iris.service import Service
from iris.stats import HandlerStats, ServiceStats, Stats, SubscriptionStats
from iris.streams import (
    CommitInfo,
    RedriveInfo,
    StagedAttempt,
    StagedPart,
    Staging,
    StreamGap,
    StreamInfo,
    StreamMessage,
    StreamPage,
    StreamRecord,
)
from iris.subscription import Subscription
from iris.survey import Scope, Survey
from iris.tunnel import EndOfTunnel, Tunnel

__all__ = [
    "AmbiguousStream",
    "Audience",
    "Call",
    "CallNext",
    "Client",
    "ClientConfig",
    "Closed",
    "ClusterKey",
    "CommitInfo",
    "ConfigError",
    "ConnectionLost",
    "DecodeError",
    "Deferred",
    "Description",
    "EncodeError",
    "EndOfTunnel",
    "HandlerInfo",
    "HandlerStats",
    "InvalidName",
    "IrisError",
    "Keyring",
    "KeyringError",
    "Limits",
    "Loss",
    "Members",
    "Message",
    "MessageTooLarge",
    "Middleware",
    "NoMembers",
    "NoStream",
    "NotActive",
    "OffsetConflict",
    "Outcome",
    "Overloaded",
    "PerMember",
    "Ping",
    "RedriveInfo",
    "Refusal",
    "RelayError",
    "RelayUnavailable",
    "RemoteError",
    "Reply",
    "Request",
    "RequestError",
    "RequestTimeout",
    "Scope",
    "Service",
    "ServiceStats",
    "SlowReceiver",
    "StagedAttempt",
    "StagedMissing",
    "StagedPart",
    "Staging",
    "Stats",
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
    "SubscriptionStats",
    "Survey",
    "TooManyWorkers",
    "Tunnel",
    "TunnelBroken",
    "connect",
]
