"""Iris: decentralized cluster messaging. Services talk to clusters by name, never to hosts.

    async with iris.connect() as client:
        reply = await client.request("databases", b"...", timeout=1.0)

Glossary, to be read from top to bottom:

Processes and connections
    relay         the daemon on each host: finds other relays, routes messages by name, and cannot read payloads
    client        the library object with which a process sends and receives messages (`iris.Client`)
    session       the connection of one client to its relay
    cluster       a named group of processes that do the same work; the smallest unit that can be addressed
    member        a session that serves a cluster; it has proved to its relay that it holds the cluster's key
    service       the handlers of a member (`iris.Service`)
    handler       a function that runs for each message of one kind
    middleware    a function around all handlers of a service, or around the requests and pushes of a client
    link          an authenticated, encrypted connection between two relays
    site          the relays that share a network key and are all linked to each other: a LAN, or a cloud region
    gateway       a relay with connections to the gateways of other sites
    federation    several sites, connected through their gateways
    bridge        a process that connects Iris to another protocol, such as HTTP or nanomsg
    peer          the other end of a connection

Names and keys
    topic         a dotted name to publish to, such as "orders.new"
    filter        a pattern for topics: '*' stands for one part, and a final '>' for all remaining ones
    cluster key   32 secret bytes that all members of a cluster, and all of its callers, share
    key id        16 public bytes that identify a cluster key
    address       a name and a key id; one name under two keys is two addresses
    keyring       the cluster keys of a process: by cluster, by topic prefix, and a default
    network key   the key that relays of one site share; it admits relays, and opens no payload
    site key      the key by which the gateways of other sites recognize a site
    group key     32 secret bytes that the stores of one bucket share; they encrypt what is in the bucket with it
    seal, open    to encrypt and authenticate a payload, and the reverse; only key holders can do either

Messages
    message       what a user sends: a payload, and headers if you like
    call          a message to members that expects a result: request, push, survey or the opening of a tunnel
    request       a call to one member, which replies
    push          a call to one member, without a reply; only failures are reported
    survey        a call to all members; each one answers
    reply         what a member answers to a request
    cast          a message to all receivers, without a reply: a broadcast or a publication
    broadcast     to send a message to all members of a cluster
    publish       to send a message to all subscribers of a topic; the message is a publication
    subscription  receives the publications whose topic matches a filter
    queue group   subscriptions that share publications: each goes to one of them
    tunnel        an ordered, two-way stream of messages between a client and one member, throttled by the receiver
    frame         the unit of transfer on a connection: one message, or several as a bundle or a run
    bundle        several casts to one address, sealed together and sent in one frame
    run           several calls to one cluster, each sealed by itself and sent in one frame
    alias         a small number that stands for an address and a sender in the data frames of one connection

Flow and losses
    interest      the clusters and topics that a relay's sessions serve or subscribe to
    advertise     to send one's own interest, and changes of it, to peers
    replica       a relay's copy of the interest of a peer
    deliver       to give a message to a handler or subscriber
    dispatch      to give a call to a member that runs it; until it has finished, the call is in flight
    hold, queue   to keep a message in memory until it can be sent or handled
    drop          to discard a message that was accepted
    refuse        not to accept a message; the sender of a call gets an error
    credit        a receiver's permission to send it a number of messages or bytes
    window        the most that may be sent and not yet confirmed; credit is granted within it
    drain         to finish what was accepted, and accept nothing new, before stopping
    loss          casts that did not arrive, or a push that failed, with their number if it is known (`iris.Loss`)
    report        to make a loss known: to `on_loss` and in `losses`, and in the log
    slow receiver a process or relay that did not read in time, so that messages for it were dropped
    audience      the number of subscribers of a topic, and its slow receivers (`iris.Audience`)

Durable streams
    store         a process that keeps streams on disk, sealed as they were sent
    stream        a durable log of a topic, of a cluster, or of what is appended; readers can start anywhere in it
    partition     one of the logs of a stream; a message's key says which one it goes to
    record        the unit of storage: one or several messages, sealed together
    offset        the position of a message in a stream; never used twice
    gap           offsets of a stream without messages, reported to its readers (`iris.StreamGap`)
    append        to write messages to a stream; it returns when they are on disk
    producer      a client that appends; it numbers its records, so that a retry is stored once
    reader        reads a stream from an offset on; it keeps its position itself
    consumer      a named position in a stream, kept by the store, whose messages its workers share
    dead letter   a message that a consumer has delivered too often without a confirmation
    tombstone     a message that marks its key as deleted
    mirror        an identical copy of a stream at another store, which can take over
    bucket        object storage that keeps streams, so that another store can take them over when a store is lost
    journal       the numbered objects in a bucket to which one store adds all its writes
    fence         the object that ends a journal when another store takes it over; no more writes are added to it
    staging       writing the records of a batch to the store before they become visible
    attempt       what one task stages for a batch; a repeated task makes another attempt
    batch         attempts that are committed together: their records appear all at once and exactly once

(SciTools Iris, for Earth science, is imported by the same name: the two do not fit in one environment.)
"""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from iris.public import *  # noqa: F403 - the public names have one list, `iris.public.__all__`
    from iris.public import __all__ as __all__
else:  # type checkers do not see this, or they would take any name for one of this module

    def __getattr__(name: str) -> object:
        """Load all public names when the first is used.

        So a module of Iris can be imported alone, which makes the command `iris` start in half the time. A program
        does not load some of them later, when it would hold up its event loop.
        """
        from importlib import import_module
        from importlib.util import find_spec

        if not name.startswith("_") and find_spec(f"iris.{name}"):
            return import_module(
                f"iris.{name}"
            )  # else `from iris import paths` would load all, in a circle
        if name == "__all__" or not name.startswith("_"):
            public = import_module("iris.public")
            globals().update({each: getattr(public, each) for each in public.__all__})
            globals()["__all__"] = public.__all__
            if name in globals():
                return globals()[name]
        raise AttributeError(f"module 'iris' has no attribute {name!r}")

    def __dir__() -> list[str]:
        from iris import public

        return sorted({*globals(), *public.__all__})
