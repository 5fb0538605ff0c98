"""What travels: names, frames and their bytes. Sans-IO."""
