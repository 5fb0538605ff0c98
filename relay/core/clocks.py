"""How far the wall clocks of other hosts are from ours, for people: nothing is decided by it."""

from __future__ import annotations

from iris.core.heartbeat import Heartbeat


def clock_status(beats: Heartbeat, now_us: int, wall_us: int | None) -> dict[str, object]:
    """Return the offset of a peer's wall clock from ours, which shows `wall_us`, ready for JSON.

    Both are None until the peer has said what its clock shows.
    """
    known = None if wall_us is None else beats.wall_offset(now_us, wall_us)
    offset_us, error_us = known or (None, None)
    return {"clock_offset_us": offset_us, "clock_error_us": error_us}
