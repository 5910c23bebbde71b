"""What is checked before anything else of a request is looked at: who asks, and by which name.

The name matters where there is no key and only this machine can ask: a web page somewhere may have its own name point
here, and its reader's browser would then let it read the answers.
"""

from __future__ import annotations

import hmac
from collections.abc import Collection

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from echelon.serve.errors import ApiError

_OPEN = ("/", "/health", "/metrics")  # the page itself has nothing in it


class Guard:
    """Asks for the key, if there is one; else, if names are given, takes requests to these alone."""

    def __init__(self, app: ASGIApp, api_key: str | None, names: Collection[str] | None) -> None:
        self._app, self._names = app, None if names is None else list(dict.fromkeys(filter(None, names)))
        self._key = api_key.encode() if api_key else None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        refusal = self._refusal(scope) if scope["type"] == "http" else None
        if refusal is None:
            await self._app(scope, receive, send)
        else:
            await refusal.response()(scope, receive, send)

    def _refusal(self, scope: Scope) -> ApiError | None:
        headers = Headers(scope=scope)
        if self._key is None:
            name = _without_port(headers.get("host", ""))
            if self._names is None or name.lower() in self._names:
                return None
            message = f"this server is for {', '.join(self._names)}, not {name!r}: start it with an API key, or --host"
            return ApiError(403, message, code="wrong_host")
        if scope["path"] in _OPEN:
            return None
        given = headers.get("authorization", "")
        kind, _, key = given.partition(" ")
        if kind.lower() == "bearer" and hmac.compare_digest(key.strip().encode("latin-1"), self._key):
            return None
        words = "the API key is wrong" if given else "this server needs an API key"
        message = f"{words}: send the header 'Authorization: Bearer KEY'"
        why = {"WWW-Authenticate": "Bearer", "Connection": "close"}  # the body is not read
        return ApiError(401, message, kind="authentication_error", code="invalid_api_key", headers=why)


def _without_port(host: str) -> str:
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.partition(":")[0]
