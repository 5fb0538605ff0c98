"""How long another store must still be gone until it counts as such."""

from __future__ import annotations

from pathlib import Path

from iris.crypto.keys import GroupKey, StoreKey, public_id
from relay.store.bucket.lookout import UNSEEN_S, Lookout
from relay.store.bucket.objects import Directory
from relay.store.bucket.sealing import Sealer
from relay.store.bucket.seen import Seen

OURS, THEIRS = (StoreKey(bytes([number]) * 32).public_key for number in (1, 2))
ADDRESS = public_id(THEIRS).hex()


def test_a_store_is_gone_when_no_relay_has_seen_it_for_long_enough(tmp_path: Path) -> None:
    sealer, objects = Sealer(GroupKey(bytes(32)), bytes), Directory(tmp_path)
    seen = Seen(objects, sealer, tmp_path)
    lookout = Lookout(objects, sealer, seen, OURS, 5.0, 100.0, lambda err: None)
    assert lookout.wait_s(OURS) is None
    assert lookout.wait_s(THEIRS) == UNSEEN_S, "it may be about to start"
    lookout.see({ADDRESS}, 110.0)
    assert lookout.wait_s(THEIRS) is None
    lookout.see(set(), 112.0)
    assert lookout.wait_s(THEIRS) == 3.0
    lookout.see(None, 114.0)  # our relay was away, so nothing is known
    lookout.see(set(), 116.0)
    assert lookout.wait_s(THEIRS) == 3.0
    lookout.taken()
    lookout.see(set(), 119.0)
    assert lookout.wait_s(THEIRS) == 0.0
    lookout.see(set(), 119.0 + 2 * UNSEEN_S)
    assert lookout.wait_s(THEIRS) == 0.0
