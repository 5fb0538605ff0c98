"""Iris with publishers that wait for full subscribers, so that nothing is dropped."""

from __future__ import annotations

from peers.iris_ import Iris, WhenFull


class IrisWaiting(Iris):
    when_full: WhenFull = "wait"


PEER = IrisWaiting
