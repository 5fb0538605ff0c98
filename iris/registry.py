"""What a client has registered at its relay, and registers again at the next: services, subscriptions, watches.

Also the client's side of a session: which service a member number stands for, and which subscriptions a flow is for.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable, Sequence
from typing import Any, Protocol

from iris.core.guard import Guard
from iris.core.inbound import InFlow
from iris.core.interfaces import Binding, Lost, Sink
from iris.core.session import Session
from iris.crypto.keyring import Keyring
from iris.crypto.keys import ClusterKey
from iris.errors import ConnectionLost, KeyringError, LocalProtocolError
from iris.membership import Watcher
from iris.service import Service
from iris.wire import frames
from iris.wire.frames import MAX_KEY_IDS
from iris.wire.names import check_address, check_topic, is_wild, matches

MAX_CACHED_KEYS = 65_536
Place = tuple[str, str]
"""filter, group"""


class Served(Binding, Protocol):
    """A service that is being served."""

    service: Service
    key_ids: set[bytes]
    going: bool

    @property
    def misses_casts(self) -> bool: ...
    def joined(self, member: int, member_id: str, key_ids: Iterable[bytes]) -> None: ...
    def leave(self) -> Coroutine[Any, Any, None]: ...
    async def stop(self) -> None: ...


class Subscriber(Sink, Protocol):
    """A subscription."""

    filter: str
    group: str

    def stop(self) -> None: ...
    def end(self) -> None: ...
    def said_all(self) -> None: ...
    def give_up(self) -> None: ...
    async def finish(self) -> None: ...


class Registry:
    """Services, subscriptions and watches of one client, and the keys they use."""

    def __init__(self, keyring: Keyring, on_keys: Callable[[], None]) -> None:
        """`on_keys` is called after the keys have changed."""
        self.keyring: Keyring
        self.services: list[Served] = []
        self.watchers: list[Watcher] = []
        self._bindings: dict[int, Served] = {}
        self._subscriptions: dict[Place, list[Subscriber]] = {}
        self._wild: dict[Place, None] = {}
        """Those of them whose filter may match more than one topic: each is looked at for every new topic."""
        self._answers: dict[Place, asyncio.Future[None]] = {}
        """The latest registration of each place: what `ready` waits for."""
        self._keys: dict[bytes, ClusterKey] = {}
        self._rings: list[Keyring] = []
        """The keyring in use, then the one before it while a session drains."""
        self._cluster_keys: dict[str, tuple[ClusterKey, ...]] = {}
        self._on_keys = on_keys
        self.learn(keyring)

    # -- keys ------------------------------------------------------------------------------------------------

    def learn(self, keyring: Keyring) -> None:
        """Use `keyring` from now on. Keys known before still open messages that are under way."""
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
        """Forget all keys that are not in the keyring in use, whoever still sends under them."""
        self._rings = [self.keyring]
        self._use(self.keyring)
        for binding in self.services:
            kept = self.keyring.for_cluster(binding.service.name)
            binding.key_ids.intersection_update(key.key_id for key in kept)
        if session is not None:
            session.casts.subscriptions_changed()
            session.forget_keys()

    def share_out(self, guard: Guard) -> None:
        """Divide the tables of `guard` among our keys."""
        guard.keys = len(self._keys)

    def find_key(self, key_id: bytes) -> ClusterKey | None:
        """Return the key of an id, if we hold it."""
        return self._keys.get(key_id)

    def cluster_keys(self, cluster: str) -> tuple[ClusterKey, ...]:
        """Return the keys of a cluster, the sealing one first, whatever site it is named in; raises InvalidName or KeyringError."""
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
        """Return the key that seals for a topic; raises InvalidName or KeyringError."""
        keys = self.keyring.for_topic(check_topic(topic))
        if not keys:
            raise KeyringError(
                f"no key for topic {topic!r}; add one with `iris key add topic:{topic.split('.')[0]}`"
            )
        return keys[0]

    # -- services --------------------------------------------------------------------------------------------

    def join(self, session: Session, binding: Served) -> asyncio.Future[None]:
        """Make `binding` a member through `session`; resolved when the relay knows."""
        service = binding.service
        done = _answer()
        try:
            ids = _prove(session, self.cluster_keys(service.name))
        except KeyringError as err:
            done.set_exception(err)
            return done
        session.registered.add(binding.number)

        def joined(ack: frames.Ack) -> None:
            if binding.going:  # nobody waited for the answer
                leave(session, ack.member)
                return
            # At once: the relay may hand over work right behind its answer.
            binding.joined(ack.member, f"{session.relay_id.hex()}.{ack.member}", ids)
            session.members.append(ack.member)
            self._bindings[ack.member] = binding

        session.ask(
            lambda number: frames.Join(number, service.name, ids, service.kinds),
            AckWaiter(done, service.name, joined),
        )
        return done

    def binding(self, flow: InFlow) -> Served | None:
        """Return the service that a flow is for; None if it did not join the flow's address, whatever the relay says."""
        binding = self._bindings.get(flow.member)
        if binding is None or flow.name != binding.service.name:
            return None
        return binding if flow.key.key_id in binding.key_ids else None

    def leave(self, session: Session | None, binding: Served) -> list[asyncio.Future[None]]:
        """Tell the relay that `binding` takes nothing new; each future is resolved when it knows.

        Where it is joining still, or is a member through a session that is not in use yet, it leaves as soon as it can.
        """
        if binding.going or session is None:
            binding.going = True
            return []
        binding.going = True
        members = [m for m in session.members if self._bindings.get(m) is binding]
        return [leave(session, member) for member in members]

    def forget(self, binding: Served) -> None:
        """It no longer serves."""
        self.services.remove(binding)
        self._bindings = {
            member: other for member, other in self._bindings.items() if other is not binding
        }

    # -- subscriptions ---------------------------------------------------------------------------------------

    def add(self, subscription: Subscriber, session: Session | None, guard: Guard) -> None:
        """Register a subscription; one filter and group is registered once, however many ask for it.

        Raises KeyringError if there is no key for it.
        """
        self._filter_keys(subscription.filter)
        place = (subscription.filter, subscription.group)
        known = self._subscriptions.setdefault(place, [])
        known.append(subscription)
        if is_wild(subscription.filter):
            self._wild[place] = None
        if session is not None:
            session.casts.subscriptions_changed()
            if len(known) == 1:
                if not subscription.group:
                    guard.resume_topics(lambda topic: self._is_new(subscription.filter, topic))
                self.subscribe(session, place)

    def subscribe(self, session: Session, place: Place) -> asyncio.Future[None]:
        """Tell the relay of `session`; resolved when it knows."""
        pattern, group = place
        done = self._answers[place] = _answer()
        try:
            ids = _prove(session, self._filter_keys(pattern))
        except KeyringError as err:
            done.set_exception(err)
            return done
        session.registered.add(place)
        session.ask(
            lambda number: frames.Subscribe(number, pattern, ids, group), AckWaiter(done, pattern)
        )
        return done

    def _filter_keys(self, pattern: str) -> tuple[ClusterKey, ...]:
        keys = self.keyring.for_filter(pattern)
        if not keys:
            raise KeyringError(f"no key for any topic of {pattern!r}")
        if len(keys) > MAX_KEY_IDS:
            text = f"{pattern!r} may match topics of {len(keys)} keys; subscribe to less at once"
            raise KeyringError(text)
        return keys

    async def ready(self, subscription: Subscriber) -> None:
        """Return when the relay knows of it; raises what it refused it with."""
        place = (subscription.filter, subscription.group)
        while (done := self._answers.get(place)) is not None:
            try:
                await asyncio.shield(done)
            except ConnectionLost:
                if self._answers.get(place) is done:
                    await asyncio.sleep(0.01)  # until the reconnect has registered it anew
            else:
                return

    def remove(
        self, subscription: Subscriber, session: Session | None
    ) -> asyncio.Future[None] | None:
        """Unregister it; if it was the last of its filter and group, return what is resolved when the relay knows."""
        place = (subscription.filter, subscription.group)
        known = self._subscriptions.get(place, [])
        if subscription not in known:
            return None
        known.remove(subscription)
        if session is not None:
            session.casts.subscriptions_changed()
        if known:
            return None
        del self._subscriptions[place]
        self._wild.pop(place, None)
        self._answers.pop(place, None)
        return _unsubscribe(session, place) if session is not None else None

    def sinks(self, flow: InFlow) -> Sequence[Sink]:
        """Return every plain subscription and one of each group that a flow is for; none if its key is not its topic's.

        A filter may stand for topics of several keys: who holds one of them may not speak for the others.
        """
        if not any(flow.key in ring.for_topic(flow.name) for ring in self._rings):
            return ()
        found: list[Sink] = []
        grouped: dict[str, list[Subscriber]] = {}
        places = [(flow.name, group) for group in ("", *sorted(flow.groups))]
        places += [place for place in self._wild if matches(place[0], flow.name)]
        for place in places:
            group, subscriptions = place[1], self._subscriptions.get(place, ())
            if subscriptions and (group in flow.groups if group else flow.plain):
                (grouped.setdefault(group, []) if group else found).extend(subscriptions)
        # Chosen by sender, so that each sender's order is kept.
        found += [each[flow.sender_id[0] % len(each)] for each in grouped.values()]
        return found

    def _is_new(self, pattern: str, topic: str) -> bool:
        """Whether a topic matches `pattern` and no other plain subscription: what was missed of it before is no gap."""
        return matches(pattern, topic) and not any(
            matches(other, topic)
            for other, group in self._subscriptions
            if not group and other != pattern
        )

    # -- all of it -------------------------------------------------------------------------------------------

    def register(self, session: Session) -> list[asyncio.Future[None]]:
        """Register everything at a new session; each future is resolved when the relay knows."""
        joining = [b for b in self.services if b.service.handlers and not b.going]
        return [
            *(self.join(session, b) for b in joining if b.number not in session.registered),
            *(
                self.subscribe(session, p)
                for p in self._subscriptions
                if p not in session.registered
            ),
        ]

    def adopted(self, session: Session) -> None:
        """`session` is in use: watches move to it, and what came or went since `register` comes or goes there, too."""
        session.casts.subscriptions_changed()
        for watcher in self.watchers:
            watcher.attach(session)
        self.register(session)
        for member in session.members:
            binding = self._bindings.get(member)
            if binding is None or binding.going:
                leave(session, member)
        for place in session.registered.copy():
            if isinstance(place, tuple) and place not in self._subscriptions:
                _unsubscribe(session, place)

    def ended(self, session: Session) -> None:
        """A session, in use or not, is over: so are its members."""
        for member in session.members:
            self._bindings.pop(member, None)

    def detached(self, reason: str) -> list[Lost]:
        """There is no relay: nobody can say how much is missed until there is one. Return what every subscription and service was told."""
        told: list[Lost] = []
        for (pattern, _), subscriptions in self._subscriptions.items():
            lost = Lost("publish", pattern, b"", None, reason)
            told.append(lost)
            for subscription in subscriptions:
                subscription.gap(lost)
        for binding in self.services:
            if binding.misses_casts:
                lost = Lost("broadcast", binding.service.name, b"", None, reason)
                told.append(lost)
                binding.gap(lost)
        return told

    def end(self) -> None:
        """The client is closed: whoever iterates or waits goes on."""
        for subscriptions in self._subscriptions.values():
            for subscription in subscriptions:
                subscription.end()
                subscription.said_all()
        for watcher in self.watchers:
            watcher.end()


class AckWaiter:
    """Turns an Ack into the result of a future, or its error; `then` runs first, in the same call."""

    __slots__ = ("_future", "_name", "_then")

    def __init__(
        self, future: asyncio.Future[None], name: str, then: Callable[[frames.Ack], None] | None = None
    ) -> None:  # fmt: skip
        self._future = future
        self._name = name
        self._then = then

    def done(self) -> bool:
        """Whether nobody waits any more. The answer is heard nevertheless, if something is to be done then."""
        return self._then is None and self._future.done()

    def set_result(self, ack: frames.Ack) -> None:
        """The relay answered."""
        if ack.error:
            self.set_exception(LocalProtocolError(f"the relay refused {self._name}: {ack.error}"))
            return
        if self._then is not None:
            self._then(ack)
        if not self._future.done():
            self._future.set_result(None)

    def set_exception(self, exception: BaseException) -> None:
        """It never will."""
        if not self._future.done():
            self._future.set_exception(exception)


def _answer() -> asyncio.Future[None]:
    """Return a future whose exception may stay unread: a reconnect registers everything anew."""
    future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    future.add_done_callback(lambda done: done.cancelled() or done.exception())
    return future


def leave(session: Session, member: int) -> asyncio.Future[None]:
    """Tell the relay that a member takes nothing new; resolved when it knows."""
    done = _answer()
    session.ask(lambda number: frames.Leave(number, member), done)
    return done


def _unsubscribe(session: Session, place: Place) -> asyncio.Future[None]:
    done = _answer()
    session.registered.discard(place)
    session.ask(lambda number: frames.Unsubscribe(number, place[0], place[1]), done)
    return done


def _prove(session: Session, keys: Sequence[ClusterKey]) -> list[bytes]:
    for key in keys:
        session.out.prove(key)
    return [key.key_id for key in keys]
