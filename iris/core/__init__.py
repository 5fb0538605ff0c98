"""The client's side of the protocol as plain objects: told what happened and when, they never wait. Sans-IO."""
