"""Errors as problem details (RFC 9457): JSON objects with `type`, `title`, `status` and `detail`."""

from __future__ import annotations

from collections.abc import Mapping
from http import HTTPStatus
from typing import Any, Final

from iris.wire.texts import json_bytes

MEDIA_TYPE: Final = b"application/problem+json"


class Problem(Exception):
    """An answer that is an error. An application raises it, and `iris.web.guard.Guard` sends it.

    `kind` is the last part of the problem's `type`, a URI reference such as "/problems/no-members"; without it the
    type is "about:blank", and `title` is the phrase of the status. `more` are further members of the object.
    """

    def __init__(
        self, status: int, detail: str, *, kind: str = "", title: str = "", headers: Mapping[str, str] | None = None,
        **more: Any,
    ) -> None:  # fmt: skip
        super().__init__(detail)
        self.status = status
        self.detail = detail
        self.kind = kind
        self.title = title or HTTPStatus(status).phrase
        self.headers = dict(headers or {})
        self.more = more

    @property
    def document(self) -> dict[str, Any]:
        """The problem as a JSON object."""
        type = f"/problems/{self.kind}" if self.kind else "about:blank"
        return {
            "type": type,
            "title": self.title,
            "status": self.status,
            "detail": self.detail,
            **self.more,
        }

    @property
    def body(self) -> bytes:
        """The problem as JSON text."""
        return json_bytes(self.document)
