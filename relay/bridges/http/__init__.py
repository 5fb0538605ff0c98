"""The bridge to HTTP: for curl, webhooks and programs without a library.

It is a client with a keyring like any other, so it reads what it passes on. `iris.web` admits requests; the bridge
checks what the caller's token allows, and translates.

    application.py  paths, and what each needs of a token
    calls.py        requests, pushes, broadcasts, surveys and publications
    topics.py       publications as server-sent events: one subscription for all readers of a filter
    streams.py      appends, and messages of streams as server-sent events
    requests.py     bodies and headers of requests
    replies.py      replies and errors as HTTP
    openapi.py      the description of all that, which the bridge serves
    process.py      the bridge as a process
"""
