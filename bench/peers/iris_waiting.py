"""Iris with publishers that wait for full subscribers, so that nothing is dropped."""

from __future__ import annotations

from peers.iris_ import Iris


class IrisWaiting(Iris):
    waits = True


PEER = IrisWaiting
