"""The client's side of the protocol as plain objects. The caller passes them frames and the time; they never wait (sans-IO)."""
