"""A store without a process or a relay. Tests send calls to it; a stub of its session accepts everything."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from iris.crypto.keys import ClusterKey, StoreKey
from iris.errors import DecodeError
from iris.wire import frames
from iris.wire.orders import KEEP, Definition, Order, SignedOrder
from iris.wire.streams import Call, Change, Delete, Refused, encode
from relay.store.errors import Refuse
from relay.store.store import Store
from support.founded import creation, founded

NOW_US = 1_800_000_000_000_000
STORE = StoreKey(b"s" * 32)
OWNER, SECOND, STRANGER = (ClusterKey(letter * 32) for letter in (b"a", b"b", b"z"))
UUID = founded(OWNER, bytes(range(16)))
DEFINITION = Definition("orders", "orders.>", max_messages=1000)
SMALL = Definition("orders", "orders.>", max_messages=1)


class Asked:
    """A call to the store; `said` is the answer."""

    def __init__(self, name: str, key: ClusterKey, call: Call) -> None:
        self.name = name
        self.key_id = key.key_id
        self.call = call
        self.said: Any = None

    def answer(self, answer: Any) -> None:
        assert self.said is None, "a question is answered once"
        self.said = answer

    def refuse(self, code: str, detail: str) -> None:
        self.answer(Refused(code, detail))


class Session:
    """A stub of a session with a relay that accepts everything; `shown` are the orders that it received."""

    def __init__(self) -> None:
        self.shown: list[SignedOrder] = []
        self.members = 0
        self.error = ""

    def grant(self, key: StoreKey, signed: SignedOrder, waiter: Any) -> None:
        self.shown.append(signed)
        self._accept(waiter)

    def join(self, name: str, key_ids: Any, kinds: Any, tag: str, waiter: Any) -> None:
        self._accept(waiter)

    def ask(self, build: Callable[[int], Any], waiter: Any) -> None:
        self._accept(waiter)

    def _accept(self, waiter: Any) -> None:
        self.members += 1
        waiter.set_result(frames.Ack(0, self.error, self.members))


class Keeper:
    """A store on a directory. It receives calls as if they were STREAM frames from its relay."""

    def __init__(self, directory: Path, *, key: StoreKey = STORE, now_us: int = NOW_US) -> None:
        self.directory = directory
        self.key = key
        self.now_us = now_us
        (directory / "streams").mkdir(parents=True, exist_ok=True)
        self.start()

    def start(self) -> None:
        """Open the streams of the directory."""
        self.store = Store(self.directory, self.key, "here", lambda: None, lambda: None)
        self.store.load(self.now_us)
        self.session = Session()
        self.store.attached(self.session, first=True)  # type: ignore[arg-type]  # a stand-in

    def restart(self) -> None:
        """Stop, and start again."""
        self.store.close()
        self.start()

    def ask(self, call: Call, *, name: str = "orders", key: ClusterKey = OWNER) -> Any:
        """Return the answer to a call."""
        self.store.now_us = self.now_us
        asked = Asked(name, key, call)
        try:
            self.store.calls.handlers[type(call)](asked, call)  # type: ignore[arg-type]  # a stand-in
        except Refuse as err:
            asked.refuse(err.code, str(err))
        except DecodeError as err:
            asked.refuse("invalid", str(err))
        return asked.said

    def create(self, *orders: SignedOrder) -> Any:
        return self.ask(creation(*orders), name=self.store.address)

    def change(self, *orders: SignedOrder, key: ClusterKey = OWNER) -> Any:
        return self.ask(Change(list(orders)), key=key)

    def delete(self, *orders: SignedOrder, name: str = "orders", key: ClusterKey = OWNER) -> Any:
        return self.ask(Delete(list(orders)), name=name, key=key)

    @property
    def max_messages(self) -> int:
        """`max_messages` in the current definition of the only stream."""
        return self.store.streams[UUID].definition.max_messages


def order(
    key: ClusterKey = OWNER,
    definition: Definition = DEFINITION,
    *,
    action: str = KEEP,
    issued_us: int = NOW_US,
    uuid: bytes = UUID,
    store: StoreKey = STORE,
    signer: ClusterKey | None = None,
    **more: Any,
) -> SignedOrder:
    """Return a signed order; `signer` may be another key than the one in the order."""
    said = encode(Order(action, uuid, key.key_id, store.public_key, issued_us, definition, **more))
    by = signer or key
    return SignedOrder(said, by.public_key, by.sign_order(said))
