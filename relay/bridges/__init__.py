"""Bridges: processes that are ordinary clients of Iris and speak another protocol on their other side."""
