"""What every page and bridge of Iris that speaks HTTP is behind.

Any program of the host can connect to loopback, and so can any web page that a browser on the host shows. Therefore
each request is checked before an application sees it.

    server.py    sockets, limits of connections, start and stop (uvicorn)
    guard.py     Host, Origin and token of each request; the headers of each answer
    tokens.py    who may do what: bearer tokens and their allow-lists
    attempts.py  how often an address may present a wrong token
    heads.py     which heads of requests are refused
    bodies.py    bodies of requests, within limits
    problems.py  errors as RFC 9457 problem details
    sending.py   answers, whole or in parts, and server-sent events

Everything that HTTP needs is in the extra [web]. Only `server.serve` imports uvicorn.
"""
