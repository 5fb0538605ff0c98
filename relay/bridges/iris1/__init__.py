"""`iris bridge iris1`: unmodified programs of the first Iris (Go, Java, Erlang) as members and callers.

core/codec.py      encodes the frames that a relay of the first Iris sends
core/decoder.py    decodes the frames that a client sends
core/names.py      translates names of the first Iris to names of this one
core/machine.py    one connection: handshake, unanswered requests, credit of its tunnels (sans-IO)
core/tunnels.py    the client's end of one tunnel: messages from chunks, windows (sans-IO)
connection.py      one connection on the event loop, with its own session at the relay
writer.py          bytes for one client, written at the end of a turn of the event loop
requests.py        requests in both directions
tunnels.py         tunnels: the client's end joined with a tunnel of this Iris
barrier.py         holds frames until subscriptions received before them are in effect
local.py           clients of one bridge among themselves: members, subscribers, casts, requests
local_tunnel.py    a tunnel between two clients of one bridge
bridge.py          listeners, all connections, counters
process.py         the process: signals and start and stop
"""
