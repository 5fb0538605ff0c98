"""The decisions of a relay as plain objects: routing, interest, load balancing, calls in flight. Sans-IO."""
