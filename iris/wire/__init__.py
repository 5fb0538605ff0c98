"""The wire format: names, frames and their bytes. Sans-IO."""
