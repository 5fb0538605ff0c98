"""`iris bridge iris1`: programs of the first Iris (Go, Java, Erlang), unmodified, as members and callers of ours.

core/codec.py     its frames and their bytes
core/names.py     its names as ours
core/machine.py   one connection: handshake, what is owed to the client, its tunnels' credit (sans-IO)
core/tunnels.py   one tunnel: messages out of chunks, windows (sans-IO)
conversation.py   one connection on the event loop, with a session of its own at the relay
calls.py          requests in both directions
lines.py          tunnels, joined end to end
gate.py           subscriptions are in effect before what is said after them
local.py          what programs of one bridge say to each other: who is here, casts, requests
near.py           a tunnel between two of them
bridge.py         listeners, all connections, counters
process.py        the process
"""
