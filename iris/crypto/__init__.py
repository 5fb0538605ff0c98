"""Keys, sealing and tunnels' records. Sans-IO: entropy and text come in as arguments.

`keys` derives everything from a cluster key or a network key, `keyring` says which key is for which
address, `sframe` seals messages (RFC 9605), `noise` encrypts tunnels. Primitives come from
`cryptography`; this package only composes them. Verification raises; it never returns a bool.
"""
