"""The client's side of the protocol as plain objects that are passed frames and the time, and never wait (sans-IO)."""
