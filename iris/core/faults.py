"""Errors of handlers: how a member puts one into a FAULT, and what the caller makes of it.

The payload of a FAULT is the text of the error. Its sealed headers hold the rest: `may-have-run`, `member`, and for a
`Refusal` its `code` and its `details` (MessagePack in base64).
"""

from __future__ import annotations

import base64
import re
from typing import Any, ClassVar, Final

import msgspec

from iris.core.bundle import Headers
from iris.core.message import Message, encode_payload
from iris.errors import DecodeError, InvalidName, MessageTooLarge, Picklable, RemoteError
from iris.wire.names import printable

MAX_DETAILS_BYTES: Final = 2048
"""Largest size of the details of a refusal, as MessagePack."""
NO_METHOD: Final = "no_method"
"""Code of the answer of a member that has no handler for the method of a call."""
BAD_PAYLOAD: Final = "bad_payload"
"""Code of the answer to a payload that does not decode into the type of the handler. No handler has run."""

_CODE: Final = re.compile(r"[A-Za-z][A-Za-z0-9_.-]{0,63}")
_MAX_ENCODED: Final = (MAX_DETAILS_BYTES + 2) // 3 * 4
"""Largest size of the details in base64."""
_decode_details: Final = msgspec.msgpack.Decoder(dict[str, Any]).decode


class Refusal(Picklable):
    """Raise it in a handler to refuse a message for a reason that the caller can act on.

        raise iris.Refusal("out_of_stock", sku=order.sku, left=0)

    The caller gets a `RemoteError` with this `code` and these `details`. `text` is for people and may be left out.
    It is an answer like any other: it is not logged, and it does not count as a failure.

    `code` is 1 to 64 letters, digits, "_", "-" and ".", and begins with a letter. `details` take at most 2,048 bytes
    as MessagePack.

    Raises:
        InvalidName: the code is not allowed.
        MessageTooLarge: the details are over the limit.
        TypeError: the details cannot be encoded.
    """

    may_have_run: ClassVar = True

    def __init__(self, code: str, text: str = "", /, **details: object) -> None:
        super().__init__(code, text)
        self.code = _checked(code)
        self.text = text
        self.packed = b""
        """The details as MessagePack; empty if there are none."""
        if details:
            try:
                self.packed, _ = encode_payload(details)
            except DecodeError as err:
                raise TypeError(f"the details of {code!r} cannot be encoded: {err}") from err
        if len(self.packed) > MAX_DETAILS_BYTES:
            raise MessageTooLarge(
                f"the details of {code!r} take {len(self.packed)} bytes, over the limit of {MAX_DETAILS_BYTES}; "
                "send an identifier instead, or return them as a reply"
            )

    @property
    def details(self) -> dict[str, Any]:
        """The details as the caller receives them."""
        return _decode_details(self.packed) if self.packed else {}

    def __str__(self) -> str:
        more = ", ".join(f"{name}={value!r}" for name, value in self.details.items())
        return self.code + (f": {self.text}" if self.text else "") + (f" ({more})" if more else "")


class NoMethod(Refusal):
    """The answer to a call of a method that the member does not have. No handler has run."""

    may_have_run: ClassVar = False

    def __init__(self, text: str) -> None:
        super().__init__(NO_METHOD, text)


def _checked(code: object) -> str:
    if not isinstance(code, str) or not _CODE.fullmatch(code):
        raise InvalidName(
            f"{str(code)[:80]!r} is not a code; use 1 to 64 letters, digits, '_', '-' and '.', beginning with a letter"
        )
    return code


def fault_headers(member: str, *, may_have_run: bool, code: str, packed: bytes) -> Headers:
    """Return the headers of a FAULT. `packed` are the details as MessagePack."""
    headers = {"may-have-run": "1" if may_have_run else "0", "member": member}
    if code:
        headers["code"] = code
    if packed:
        headers["details"] = base64.b64encode(packed).decode()
    return headers


def error_of_fault(name: str, fault: Message) -> RemoteError:
    """Return the error that a FAULT means for the caller of the cluster `name`."""
    headers = fault.headers or {}
    detail = fault.payload.decode(errors="replace")
    details: dict[str, Any] = {}
    packed = headers.get("details", "")
    try:
        # Decoded details may take a hundred times as much memory.
        if len(packed) > _MAX_ENCODED:
            detail += f" (its details are over the limit of {MAX_DETAILS_BYTES} bytes, so they were not decoded)"
        elif packed:
            details = _decode_details(base64.b64decode(packed, validate=True))
    except (
        ValueError,
        TypeError,
        RecursionError,
    ) as err:  # the member has a bug; keep what can be read
        detail += f" (its details cannot be decoded: {err})"
    code = headers.get("code") or None
    if code is not None and not _CODE.fullmatch(code):
        detail += f" (its code is not a code: {printable(code[:80])!r})"
        code = None
    ran = headers.get("may-have-run") != "0"
    return RemoteError(name, detail, may_have_run=ran, code=code, details=details)
