"""The registrations of one client: services, subscriptions and watches, registered again at each new relay.

It also finds, for a session, the service of a member number and the subscriptions that a flow is for.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable, Sequence
from typing import Any, Protocol

from msgspec import UNSET

from iris.core.guard import Guard
from iris.core.inbound import InFlow
from iris.core.interfaces import Binding, Loss, Sink
from iris.core.message import Message
from iris.core.session import Session
from iris.crypto.keyring import Keyring
from iris.crypto.keys import ClusterKey
from iris.errors import ConnectionLost, KeyringError, LocalProtocolError
from iris.membership import Watcher
from iris.service import Service
from iris.tally import Tally
from iris.wire import frames
from iris.wire.frames import MAX_KEY_IDS
from iris.wire.names import check_address, check_topic, is_wild, matches

MAX_CACHED_KEYS = 65_536
Registration = tuple[str, str]
"""(filter, group) of a subscription, which is registered once however many subscriptions share it."""


class Served(Binding, Protocol):
    """A service that is being served; `iris.serving.ServiceBinding` is one."""

    service: Service
    key_ids: set[bytes]
    leaving: bool
    member_id: str
    running: int

    @property
    def expects_broadcasts(self) -> bool: ...
    def joined(self, member: int, member_id: str, key_ids: Iterable[bytes]) -> None: ...
    @property
    def queued_bytes(self) -> int: ...
    def tallies(self) -> list[tuple[int, str, Tally]]: ...
    def runs_in(self, task: asyncio.Task[Any]) -> bool: ...
    def leave(self) -> Coroutine[Any, Any, None]: ...
    async def stop(self) -> None: ...


class Subscriber(Sink, Protocol):
    """A subscription; `iris.subscription.Subscription` is one."""

    filter: str
    group: str
    lost_messages: int
    stopped: asyncio.Future[None] | None

    @property
    def queued_bytes(self) -> int: ...

    def runs_in(self, task: asyncio.Task[Any]) -> bool: ...
    def stop(self) -> None: ...
    def end(self) -> None: ...
    def end_log(self) -> None: ...
    def give_up(self) -> None: ...
    async def finish(self) -> None: ...


class Sharers:
    """Several subscriptions in one queue group, which share each bundle. Each keeps the order of each sender."""

    def __init__(self, sinks: Sequence[Sink], first: int) -> None:
        """`first` says which one begins, so that those of several senders do not begin with the same."""
        self._sinks = sinks
        self._turn = first
        """Rises with every part of a bundle."""
        waiting = [sink for sink in sinks if sink.waits]
        self._waiting = waiting
        self.waits = bool(waiting)
        self.limit_bytes = min(sink.limit_bytes for sink in waiting or sinks)

    def held(self, name: str, source: bytes) -> int:
        """Return the queued bytes of a sender where there are most."""
        return max((sink.held(name, source) for sink in self._waiting), default=0)

    def deliver(self, messages: list[Message], size: int) -> None:
        """Deliver a bundle in as many parts as there are subscriptions, to one after another."""
        sinks, count = self._sinks, len(messages)
        step = -(-count // len(sinks))
        for at in range(0, count, step):
            part = messages[at : at + step]
            self._turn += 1
            sinks[self._turn % len(sinks)].deliver(part, max(1, size * len(part) // count))

    def gap(self, loss: Loss) -> None:
        """Report a loss to one of them, because nobody knows whose it would have been."""
        self._sinks[0].gap(loss)


class Registry:
    """Services, subscriptions and watches of one client, and the keys they use."""

    def __init__(self, keyring: Keyring, on_keys: Callable[[], None]) -> None:
        """`on_keys` is called after the keys have changed."""
        self.keyring: Keyring
        self.services: list[Served] = []
        self.watchers: list[Watcher] = []
        self._bindings: dict[int, Served] = {}
        """Member number -> its service."""
        self._subscriptions: dict[Registration, list[Subscriber]] = {}
        self._leaving: dict[Registration, list[Subscriber]] = {}
        """The last subscriptions of a queue group and filter, until the relay sends them nothing more."""
        self._wild: dict[Registration, None] = {}
        """Registrations whose filter may match several topics. Each of these is tried for every new topic."""
        self._answers: dict[Registration, asyncio.Future[None]] = {}
        """Pending or last answer of the relay to each registration; `ready` waits for it."""
        self._keys: dict[bytes, ClusterKey] = {}
        """Keys of all keyrings in `_rings`: key id -> key."""
        self._derived: dict[bytes, ClusterKey] = {}
        """Keys of subscriptions that a keyring derived: key id -> key."""
        self._rings: list[Keyring] = []
        """The keyring in use, then, while an old session drains, the ones before it."""
        self._cluster_keys: dict[str, tuple[ClusterKey, ...]] = {}
        """Cache of at most `MAX_CACHED_KEYS` entries: cluster -> its keys, the sealing one first."""
        self._on_keys = on_keys
        self.learn(keyring)

    # -- keys ------------------------------------------------------------------------------------------------

    def learn(self, keyring: Keyring) -> None:
        """Use `keyring` from now on. Keys known before still open messages that are on the way."""
        self._rings = [keyring, *self._rings]
        self._use(keyring)

    def _use(self, keyring: Keyring) -> None:
        self.keyring = keyring
        self._cluster_keys.clear()
        self._keys = {
            key.key_id: key
            for ring in self._rings
            for keys in ring.entries().values()
            for key in keys
        }
        for watcher in self.watchers:
            watcher.use(self.cluster_keys)
        self._on_keys()

    def forget_keys(self, session: Session | None) -> None:
        """Forget all keys that are not in the keyring in use, even if other processes still send under them."""
        self._rings = [self.keyring]
        self._use(self.keyring)
        self._learn_derived()
        for binding in self.services:
            kept = self.keyring.for_cluster(binding.service.name)
            binding.key_ids.intersection_update(key.key_id for key in kept)
        if session is not None:
            session.casts.subscriptions_changed()
            session.forget_keys()

    def share_out(self, guard: Guard) -> None:
        """Divide the table sizes of `guard` evenly among the keys."""
        guard.keys = len(self._keys)

    def find_key(self, key_id: bytes) -> ClusterKey | None:
        """Return the key with this id, or None."""
        return self._keys.get(key_id) or self._derived.get(key_id)

    def cluster_keys(self, cluster: str) -> tuple[ClusterKey, ...]:
        """Return the keys of a cluster (with or without a site), the sealing one first.

        Raises InvalidName or KeyringError.
        """
        keys = self._cluster_keys.get(cluster)
        if keys is None:
            keys = self.keyring.for_cluster(check_address(cluster)[1])
            if not keys:
                raise KeyringError(
                    f"no key for cluster {cluster!r}; add one with `iris key add {cluster}`"
                )
            if len(self._cluster_keys) >= MAX_CACHED_KEYS:
                self._cluster_keys.clear()
            self._cluster_keys[cluster] = keys
        return keys

    def topic_key(self, topic: str) -> ClusterKey:
        """Return the key that seals messages of a topic. Raises InvalidName or KeyringError."""
        keys = self.keyring.for_topic(check_topic(topic))
        if not keys:
            raise KeyringError(
                f"no key for topic {topic!r}; add one with `iris key add topic:{topic.split('.')[0]}`"
            )
        return keys[0]

    # -- services --------------------------------------------------------------------------------------------

    def join(self, session: Session, binding: Served) -> asyncio.Future[None]:
        """Send JOIN for `binding` through `session`; the future is resolved when the relay has answered."""
        service = binding.service
        done = _answer()
        try:
            ids = _prove(session, self.cluster_keys(service.name))
        except KeyringError as err:
            done.set_exception(err)
            return done
        session.registered.add(binding.number)

        def joined(ack: frames.Ack) -> None:
            if binding.leaving:  # it was told to leave before the answer arrived
                leave(session, ack.member)
                return
            # In this call, because the relay may dispatch work right after its answer.
            binding.joined(ack.member, f"{session.relay_id.hex()}.{ack.member}", ids)
            session.members.append(ack.member)
            self._bindings[ack.member] = binding

        session.ask(
            lambda number: frames.Join(
                number,
                service.name,
                ids,
                service.kinds,
                methods=service.method_count,
            ),
            AckWaiter(done, service.name, joined),
        )
        return done

    def binding(self, flow: InFlow) -> Served | None:
        """Return the service that a flow is for; None if it did not join the address, whatever the relay says."""
        binding = self._bindings.get(flow.member)
        if binding is None or flow.name != binding.service.name:
            return None
        return binding if flow.key.key_id in binding.key_ids else None

    def leave(self, session: Session | None, binding: Served) -> list[asyncio.Future[None]]:
        """Send LEAVE for each member of `binding`; each future is resolved when the relay has answered.

        Members that are still joining, or belong to a session not yet in use, leave as soon as they can.
        """
        if binding.leaving or session is None:
            binding.leaving = True
            return []
        binding.leaving = True
        members = [m for m in session.members if self._bindings.get(m) is binding]
        return [leave(session, member) for member in members]

    def forget(self, binding: Served) -> None:
        """Remove a service that has ended."""
        self.services.remove(binding)
        self._bindings = {
            member: other for member, other in self._bindings.items() if other is not binding
        }

    # -- subscriptions ---------------------------------------------------------------------------------------

    def add(self, subscription: Subscriber, session: Session | None, guard: Guard) -> None:
        """Add a subscription, and register its filter and group unless they are registered already.

        Raises KeyringError if there is no key for the filter.
        """
        self._filter_keys(subscription.filter)
        registration = (subscription.filter, subscription.group)
        known = self._subscriptions.setdefault(registration, [])
        known.append(subscription)
        if is_wild(subscription.filter):
            self._wild[registration] = None
        if session is not None:
            session.casts.subscriptions_changed()
            if len(known) == 1:
                if not subscription.group:
                    guard.resume_topics(lambda topic: self._is_new(subscription.filter, topic))
                self.subscribe(session, registration)

    def subscribe(self, session: Session, registration: Registration) -> asyncio.Future[None]:
        """Send SUBSCRIBE through `session`; the future is resolved when the relay has answered."""
        pattern, group = registration
        done = self._answers[registration] = _answer()
        try:
            keys = self._filter_keys(pattern)
            ids = _prove(session, keys)
        except KeyringError as err:
            done.set_exception(err)
            return done
        self._derived.update((key.key_id, key) for key in keys if key.key_id not in self._keys)
        session.registered.add(registration)
        session.ask(
            lambda number: frames.Subscribe(number, pattern, ids, group), AckWaiter(done, pattern)
        )
        return done

    def _learn_derived(self) -> None:
        """Forget derived keys that no subscription needs any more."""
        if self._derived:
            needed = (
                key
                for pattern, _ in (*self._subscriptions, *self._leaving)
                for key in self.keyring.for_filter(pattern)
            )
            self._derived = {key.key_id: key for key in needed if key.key_id not in self._keys}

    def _filter_keys(self, pattern: str) -> tuple[ClusterKey, ...]:
        keys = self.keyring.for_filter(pattern)
        if not keys:
            raise KeyringError(
                f"no key for any topic that matches {pattern!r}; add one with `iris key add topic:PREFIX`, or, if the keyring derives a key for each "
                "name there, subscribe to one name"
            )
        if len(keys) > MAX_KEY_IDS:
            text = f"{pattern!r} may match topics of {len(keys)} keys, over the limit of {MAX_KEY_IDS}; use narrower filters"
            raise KeyringError(text)
        return keys

    def subscriptions(self) -> list[Subscriber]:
        """Return all subscriptions."""
        return [each for registered in self._subscriptions.values() for each in registered]

    async def ready(self, subscription: Subscriber) -> None:
        """Wait until the relay has registered the subscription; raises the error if it refused."""
        registration = (subscription.filter, subscription.group)
        while (done := self._answers.get(registration)) is not None:
            try:
                await asyncio.shield(done)
            except ConnectionLost:
                if self._answers.get(registration) is done:
                    await asyncio.sleep(0.01)  # until the reconnect has registered it again
            else:
                return

    def remove(
        self, subscription: Subscriber, session: Session | None
    ) -> asyncio.Future[None] | None:
        """Remove a subscription.

        If it was the last of its filter and group, send UNSUBSCRIBE and return a future that is resolved when
        the relay has answered. Until then, one with a group gets what was on its way, because nobody else does.
        """
        registration = (subscription.filter, subscription.group)
        known = self._subscriptions.get(registration, [])
        if subscription not in known:
            return None
        known.remove(subscription)
        answer = None
        if not known:
            del self._subscriptions[registration]
            self._answers.pop(registration, None)
            answer = _unsubscribe(session, registration) if session is not None else None
            if answer is not None and subscription.group:
                self._leaving.setdefault(registration, []).append(subscription)
                answer.add_done_callback(lambda _: self.left(subscription, session))
            self._forget(registration)
        if session is not None:
            session.casts.subscriptions_changed()
        return answer

    def left(self, subscription: Subscriber, session: Session | None) -> None:
        """Deliver nothing more to a subscription that was removed, and end it. Idempotent."""
        registration = (subscription.filter, subscription.group)
        leaving = self._leaving.get(registration, [])
        if subscription in leaving:
            leaving.remove(subscription)
            if not leaving:
                del self._leaving[registration]
            self._forget(registration)
            if session is not None:
                session.casts.subscriptions_changed()
        subscription.end()

    def _forget(self, registration: Registration) -> None:
        """Forget the topics and keys of a registration that nobody has any more."""
        if registration not in self._subscriptions and registration not in self._leaving:
            self._wild.pop(registration, None)
            self._learn_derived()

    def sinks(self, flow: InFlow) -> Sequence[Sink]:
        """Return the subscriptions that a flow is for: all plain ones, and one of each group.

        Return none if the flow's key is not the key of its topic. A filter may match topics of several keys,
        and a holder of one key must not publish under the others.
        """
        if not any(flow.key in ring.for_topic(flow.name) for ring in self._rings):
            return ()
        found: list[Sink] = []
        grouped: dict[str, list[Subscriber]] = {}
        registrations = [(flow.name, group) for group in ("", *sorted(flow.groups))]
        registrations += [
            registration for registration in self._wild if matches(registration[0], flow.name)
        ]
        for registration in registrations:
            group = registration[1]
            subscriptions = self._subscriptions.get(registration) or self._leaving.get(registration)
            if subscriptions and (group in flow.groups if group else flow.plain):
                (grouped.setdefault(group, []) if group else found).extend(subscriptions)
        for each in grouped.values():
            found.append(each[0] if len(each) == 1 else Sharers(each, flow.sender_id[0]))
        return found

    def _is_new(self, pattern: str, topic: str) -> bool:
        """Return whether a topic matches `pattern` and no other plain subscription.

        Earlier messages are then not a gap.
        """
        return matches(pattern, topic) and not any(
            matches(other, topic)
            for other, group in self._subscriptions
            if not group and other != pattern
        )

    # -- all of it -------------------------------------------------------------------------------------------

    def register(self, session: Session) -> list[asyncio.Future[None]]:
        """Register everything at a new session; each future is resolved when the relay has answered."""
        joining = [b for b in self.services if b.service.handlers and not b.leaving]
        return [
            *(self.join(session, b) for b in joining if b.number not in session.registered),
            *(
                self.subscribe(session, registration)
                for registration in self._subscriptions
                if registration not in session.registered
            ),
        ]

    def adopted(self, session: Session) -> None:
        """Move watches to `session`, which is in use now, and bring its registrations up to date.

        Services and subscriptions may have been added or removed since `register`.
        """
        session.casts.subscriptions_changed()
        for watcher in self.watchers:
            watcher.attach(session)
        self.register(session)
        for member in session.members:
            binding = self._bindings.get(member)
            if binding is None or binding.leaving:
                leave(session, member)
        for registration in session.registered.copy():
            if isinstance(registration, tuple) and registration not in self._subscriptions:
                _unsubscribe(session, registration)

    def ended(self, session: Session) -> None:
        """Remove the members of a session that has ended."""
        for member in session.members:
            self._bindings.pop(member, None)

    def detached(self, reason: str) -> list[Loss]:
        """Report a loss of unknown count to each subscription and service, and return the losses.

        Without a relay nobody can know how many messages they miss.
        """
        losses: list[Loss] = []
        for (pattern, _), subscriptions in (*self._subscriptions.items(), *self._leaving.items()):
            loss = Loss("publish", pattern, b"", None, reason)
            losses.append(loss)
            for subscription in subscriptions:
                subscription.gap(loss)
        for binding in self.services:
            if binding.expects_broadcasts:
                loss = Loss("broadcast", binding.service.name, b"", None, reason)
                losses.append(loss)
                binding.gap(loss)
        return losses

    def end(self) -> None:
        """End all subscriptions and watches, because the client is closed."""
        for subscriptions in (*self._subscriptions.values(), *self._leaving.values()):
            for subscription in subscriptions:
                subscription.end()
                subscription.end_log()
        for watcher in self.watchers:
            watcher.end()


class AckWaiter:
    """Resolves a future by the relay's Ack, or by the error in it. `then` is called first, in the same call."""

    __slots__ = ("_future", "_name", "_then")

    def __init__(
        self, future: asyncio.Future[None], name: str, then: Callable[[frames.Ack], None] | None = None
    ) -> None:  # fmt: skip
        self._future = future
        self._name = name
        self._then = then

    def done(self) -> bool:
        """Return whether the answer is no longer needed. With `then` it is always needed."""
        return self._then is None and self._future.done()

    def set_result(self, ack: frames.Ack) -> None:
        """Handle the relay's answer."""
        if ack.error:
            self.set_exception(LocalProtocolError(f"the relay refused {self._name}: {ack.error}"))
            return
        if self._then is not None:
            self._then(ack)
        if not self._future.done():
            self._future.set_result(None)

    def set_exception(self, exception: BaseException) -> None:
        """Handle the end of the session before an answer."""
        if not self._future.done():
            self._future.set_exception(exception)


def _answer() -> asyncio.Future[None]:
    """Return a future whose exception may stay unread, because a reconnect registers everything again."""
    future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    future.add_done_callback(lambda done: done.cancelled() or done.exception())
    return future


def leave(session: Session, member: int) -> asyncio.Future[None]:
    """Send LEAVE for a member; the future is resolved when the relay has answered."""
    done = _answer()
    session.ask(lambda number: frames.Leave(number, member), done)
    return done


def leave_groups(session: Session, *, stay: bool = False) -> list[asyncio.Future[None]]:
    """Leave all queue groups of a session that is being left, so that their messages come by another one.

    Each future is resolved when nothing more can come by this session; with `stay`, when only what nobody else takes
    can.
    """
    groups = [each for each in session.registered if isinstance(each, tuple) and each[1]]
    return [_unsubscribe(session, registration, stay=stay) for registration in groups]


def _unsubscribe(
    session: Session, registration: Registration, *, stay: bool = False
) -> asyncio.Future[None]:
    done = _answer()
    session.registered.discard(registration)
    pattern, group = registration
    session.ask(lambda number: frames.Unsubscribe(number, pattern, group, stay=stay or UNSET), done)
    return done


def _prove(session: Session, keys: Sequence[ClusterKey]) -> list[bytes]:
    """Prove each key to the relay, unless that was done before, and return their ids."""
    for key in keys:
        session.out.prove(key)
    return [key.key_id for key in keys]
