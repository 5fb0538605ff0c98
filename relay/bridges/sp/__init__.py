"""The bridge to Scalability Protocols (SP): connects programs of nanomsg, nng and Mangos to clusters
and topics.

The process has a list of entries, `config.SocketConfig`. Each entry has its own SP socket (through
pynng) and its own session with the relay, so that no entry waits for another. `protocol` names the
bridge's side of the pattern:

    rep          a REQ peer asks, a member of the cluster answers          requests.py
    req          a member asks the cluster, a REP peer answers
    respondent   a SURVEYOR peer asks, all members answer                  surveys.py
    surveyor     a member surveys the cluster, RESPONDENT peers answer
    sub          messages of PUB peers become publications                 topics.py
    pub          publications reach SUB peers
    pull         messages of PUSH peers become pushes to the cluster       pipeline.py
    push         pushes to the cluster reach PULL peers
    bus          BUS peers and broadcasts of the cluster, both ways        bus.py
    pair         a connection of a PAIR peer is a tunnel                   pair.py

The bridge uses only the public names of `iris`. Only `sockets.py` and `opening.py` use pynng.
"""
