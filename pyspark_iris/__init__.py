"""Lets Spark find the format "iris" by itself.

When a session first needs a format, Spark looks for modules called `pyspark_…`.
"""

from __future__ import annotations

from iris.spark import IrisSource, register

DefaultSource = IrisSource

__all__ = ["DefaultSource", "register"]
