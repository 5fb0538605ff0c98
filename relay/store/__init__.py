"""Durable streams: the log of one stream on disk. Imports nothing of the relay's routing."""
