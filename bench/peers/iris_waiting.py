"""Iris, whose publishers wait for subscribers that ask for it, so that nothing is dropped."""

from __future__ import annotations

from peers.iris_ import Iris, WhenFull


class IrisWaiting(Iris):
    when_full: WhenFull = "wait"


PEER = IrisWaiting
