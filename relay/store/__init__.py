"""Durable streams: the store process, and the logs of its streams on disk.

Imports nothing of the relay's routing.
"""

from iris.extras import install_line


def needs_rocksdb() -> str:
    """Return the text of the error that the package of a store is missing."""
    return f"a store requires RocksDB; install it with: {install_line('store')}"
