"""Durable streams: the store process, and the logs of its streams on disk.

Imports nothing of the relay's routing.
"""
