"""Turns warnings of the zeroconf library into log events of Iris, at a limited rate, while a discovery runs."""

from __future__ import annotations

import logging
import time

from relay.logs import Quiet

log = logging.getLogger("relay.discovery.zeroconf")  # the name that operators know


class ZeroconfLogFilter(logging.Filter):
    """The filter of the zeroconf library's log. Each discovery calls `begin` once and `end` once."""

    def __init__(self) -> None:
        super().__init__()
        self._quiet = Quiet(limit=64)
        self._users = 0

    def begin(self) -> None:
        self._users += 1
        logging.getLogger("zeroconf").addFilter(self)  # adding it twice has no effect

    def end(self) -> None:
        self._users -= 1
        if not self._users:
            logging.getLogger("zeroconf").removeFilter(self)

    def filter(self, record: logging.LogRecord) -> bool:
        if record.levelno < logging.WARNING:
            return True
        fields = {"text": record.getMessage()[:300]}
        self._quiet.warning(log, "discovery.zeroconf", record.msg, time.monotonic(), fields)
        return False


zeroconf_log = ZeroconfLogFilter()
