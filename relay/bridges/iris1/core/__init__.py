"""The protocol of the first Iris, without IO."""
