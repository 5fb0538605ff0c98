"""The bridge to Scalability Protocols: programs of nanomsg, nng and Mangos in clusters and topics.

A bridge is a process with a list of entries, `config.SocketConfig`. Each entry is one SP socket (through pynng) and one session
with the relay, so that none waits for another. Of the two protocols of a pattern an entry names its own, the bridge's:

    rep          their REQ asks, a member of the cluster answers          requests.py
    req          a member asks the cluster, their REP answers
    respondent   their SURVEYOR asks, all members answer                  surveys.py
    surveyor     a member surveys the cluster, their RESPONDENTs answer
    sub          their PUB becomes publications                           topics.py
    pub          publications reach their SUB
    pull         their PUSH becomes pushes to the cluster                 pipeline.py
    push         pushes to the cluster reach their PULL
    bus          their BUS and broadcasts of the cluster, both ways       bus.py
    pair         a connection of their PAIR is a tunnel                   pair.py

It uses the public names of `iris` alone; `sockets.py` and `opening.py` are what knows pynng.
"""
