"""Durable streams: the store process, and the logs of its streams on disk.

Imports nothing of the relay's routing.
"""

NEEDS_ROCKSDB = "a store requires RocksDB; install it with: pip install 'iris-messaging[store]'"
