"""Channels of calls: that a store believes no relay, and a client believes nobody in its store's place."""

from __future__ import annotations

from proofs.sabotages.sabotage import Sabotage

CALLS = ("tests/protocol/test_store_calls.py",)
CRYPTO = "iris/crypto/channel.py"
CALLER = "iris/core/channels.py"
TABLE = "relay/store/channels.py"
KEEPER = "relay/store/keeper.py"

_ROWS = (
    (KEEPER, "Store.asked", "question.channel is None and", "False and", "whoever has a relay that lies calls stores without a key"),
    (KEEPER, "Store._on_open", "key_id != question.key_id", "False", "any key opens a channel to a stream"),
    (KEEPER, "Store._on_list", "channel.key_id in s.orders", "True", "who holds one key learns the streams of all"),
    (KEEPER, "Store._on_list", "channel.uuid != streams.NO_LOG", "False", "a channel to one stream lists others"),
    (TABLE, "Channels.unseal", "self._place(channel) != (question.name, question.key_id)", "False", "a relay hands a call for one log to another"),
    (TABLE, "Channels.open", "not 0 <= now_us - shown_us <= DOOR_US", "False", "a recorded opening is good for ever"),
    (TABLE, "Channels.open", "call.door in self._spent", "False", "a relay that repeats an opening fills the table"),
    (TABLE, "Channels._room", "len(own) < self._most_of_key and len(self._channels) < self._most", "True", "the table of channels grows without bound"),
    (CRYPTO, "Channel.open", "not compare_digest( wanted, data[_MAC_AT:SEALED_BYTES] )", "False", "a relay alters calls and answers"),
    (CRYPTO, "Channel.accept", "self._window.check(counter)", "pass", "a relay has a call done twice"),
    (CRYPTO, "Codes.code", "(head, end, size, body)", "(head, size, body)", "a relay alters when a call was sent"),
    (CRYPTO, "accept_offer", "verify_caller(public_key, signature, said)", "pass", "who knows a public key opens a channel"),
    (CRYPTO, "Offer.opened", "verify_channel(self._store, signature, said)", "pass", "a store without its key answers"),
    (CALLER, "own_orders", "find_key(key_id) is not None and", "", "a store of a stranger's is believed to hold our stream"),
    (CALLER, "own_orders", "(order.key_id, order.action, order.store) == (key_id, KEEP, store)", "True", "a store that no order names answers for the stream"),
    (CALLER, "Line._door", "if not ours", "if False", "a call goes to whoever answers the knock"),
    ("iris/core/calling.py", "Calling._unsealed", "counter == called.counter", "counter >= 0", "a relay swaps two answers"),
    ("iris/core/calling.py", "Calling._again", "not called.body", "False", "a write is sent twice because a relay says so"),
)  # fmt: skip

SABOTAGES = tuple(
    Sabotage(f"channel-{number}", path, function, find, put, CALLS, breaks)
    for number, (path, function, find, put, breaks) in enumerate(_ROWS, 1)
)
