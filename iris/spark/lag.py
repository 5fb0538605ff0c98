"""How far a query is behind its streams, as its last batch showed."""

from __future__ import annotations

from msgspec import Struct


class StreamLag(Struct, frozen=True):
    """The position of a query in one stream, or in one of its partitions."""

    position: int
    """The first offset of the next batch."""
    lag: int | None
    """Offsets up to the end of the stream, gaps included; None if Spark does not report the end."""


class QueryLag(Struct, frozen=True):
    """Figures of the last batch of a query."""

    query: str
    """The query's id, the same after a restart from its checkpoint."""
    run: str
    name: str
    """The query's name; empty if it has none."""
    batch: int
    batch_ms: int
    rows: int
    rows_per_s: float
    """Rows of the batch divided by its duration."""
    streams: dict[str, StreamLag]
    """Position by stream, or by partition ("orders/1") for partitions above 0."""
