"""The relay's decisions as plain objects: routing, interest, balancing, pending requests. Sans-IO."""
