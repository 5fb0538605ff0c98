"""The page of a live network: `iris dashboard`. It draws what `iris.watch` knows, and changes nothing but consumers.

    feed.py     the events that a page gets, and the last minutes of the figures at the top
    app.py      the addresses of the service, and who may use which
    actions.py  what its buttons do
    serving.py  a dashboard from start to stop
    static/     the page: one HTML, one CSS and one ES module, served as they are

Every text that comes from the network goes to the page as JSON, and there into the text of an element, never into its
markup. The page asks nothing of other hosts, and its Content-Security-Policy would not let it.
"""
