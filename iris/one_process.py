"""Objects that belong to one process, because they use its connection or hold its keys."""

from __future__ import annotations

from typing import NoReturn, SupportsIndex


class OneProcess:
    """Base class of objects that refuse to be pickled or copied, and say why."""

    __slots__ = ()
    _why = "it uses a connection of this process; connect a client in the other process, and make one there"

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        raise TypeError(f"cannot pickle or copy this {type(self).__name__}: {self._why}")
