"""Keys, sealed messages and tunnel records. Sans-IO: entropy and text are passed in as arguments.

`keys` derives everything from the secrets, `keyring` maps addresses to keys, `sframe` seals messages (RFC
9605), `noise` encrypts tunnels, `channel` authenticates calls to stores, `certificates` makes X.509
certificates. The primitives come from `cryptography`; this package only composes them. Verification raises an
error; it never returns a bool.
"""
