"""Objects of `async with` and `async for` that say so when they are awaited or entered with a plain `with`."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar


class AsyncOnly:
    """Raises TypeError with the right way to use an object, where Python's own error has no hint.

    Type checkers do not see these methods, so that they report the mistake, too.
    """

    _right_use: ClassVar[str]

    if not TYPE_CHECKING:

        def __await__(self):
            raise TypeError(f"a {type(self).__name__} cannot be awaited; use `{self._right_use}`")

        def __enter__(self):
            raise TypeError(f"a {type(self).__name__} needs `async with`: `{self._right_use}`")

        def __exit__(self, *_):
            raise AssertionError("it was never entered")
