"""Which heads of HTTP requests are refused, because a proxy in front of the service may read them in another way.

A parser that takes more than the standard's form can see other requests than the proxy does, so that a client smuggles
one past it (RFC 9112, section 11.2). All servers of Iris use this one check, whatever parses for them.
"""

from __future__ import annotations

import re

_BARE = re.compile(rb"(?<!\r)\n|\r(?!\n|\Z)")
_FRAMING = re.compile(rb"^(content-length|transfer-encoding)[ \t]*:", re.IGNORECASE)


def fault(head: bytes) -> str:
    """Return what is wrong with a head: its first line and headers, as received. Empty if nothing is.

    The head may be incomplete, and trailers of a body can be checked, too.
    """
    if _BARE.search(head):
        return "a line of the head does not end with CR LF; end each line with both"
    lines = head.split(b"\r\n")
    if any(line[:1] in (b" ", b"\t") for line in lines):
        return "a header is folded over several lines; write it on one line"
    framing = {found[1].lower() for line in lines if (found := _FRAMING.match(line))}
    if len(framing) > 1:
        return "the request has both Content-Length and Transfer-Encoding; send one of them"
    if b"transfer-encoding" in framing and lines[0].endswith(b" HTTP/1.0"):
        return "the request has Transfer-Encoding, which HTTP/1.0 does not have; use HTTP/1.1"
    return ""
