"""The name by which Spark finds the format "iris" by itself: it looks for modules called `pyspark_…` when a session first needs a format."""

from __future__ import annotations

from iris.spark import IrisSource, register

DefaultSource = IrisSource

__all__ = ["DefaultSource", "register"]
