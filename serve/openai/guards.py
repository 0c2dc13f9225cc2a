"""ASGI middleware that checks the host name, the key and the size of every request."""

import hmac
import json
from collections.abc import Sequence
from typing import Any

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send


def error_body(message: str, kind: str, code: str | None = None, param: str | None = None) -> dict[str, Any]:
    """Return an error in the format of the OpenAI API."""
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


async def refuse(send: Send, status: int, message: str, kind: str, headers: Sequence[tuple[str, str]] = ()) -> None:
    """Send an error response."""
    body = json.dumps(error_body(message, kind)).encode()
    named = [("content-type", "application/json"), ("content-length", str(len(body))), *headers]
    await send({"type": "http.response.start", "status": status, "headers": [(n.encode(), v.encode()) for n, v in named]})
    await send({"type": "http.response.body", "body": body})


class HostGuard:
    """Rejects requests with an unknown `Host`, as a malicious web page would send them through DNS rebinding.

    Args:
        app: The application.
        hosts: The names, without ports and brackets.
    """

    def __init__(self, app: ASGIApp, hosts: Sequence[str]) -> None:
        self._app, self._hosts = app, {host.lower() for host in hosts}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Forward a request, or reject it."""
        if scope["type"] == "http":
            host = Headers(scope=scope).get("host", "")
            # An IPv6 address is in brackets, since it contains colons; the port follows them.
            name = host.partition("]")[0].removeprefix("[") if host.startswith("[") else host.partition(":")[0]
            if name.lower() not in self._hosts:
                message = f"the host name {name[:100]!r} is not allowed; allow it with --allowed-host"
                await refuse(send, 400, message, "invalid_request_error")
                return
        await self._app(scope, receive, send)


class KeyGuard:
    """Requires a key in the header `Authorization: Bearer KEY`.

    Args:
        app: The application.
        keys: The keys; if empty, only the paths of `keys_by_path` are guarded.
        keys_by_path: Paths with a separate key.
        open_paths: Paths that need no key.
    """

    def __init__(self, app: ASGIApp, keys: Sequence[str], keys_by_path: dict[str, str], open_paths: Sequence[str]) -> None:
        self._app, self._keys, self._keys_by_path, self._open = app, list(keys), keys_by_path, set(open_paths)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Forward a request, or reject it."""
        path = scope.get("path", "")
        keys = [self._keys_by_path[path]] if path in self._keys_by_path else self._keys
        if scope["type"] != "http" or not keys or path in self._open:
            await self._app(scope, receive, send)
            return
        scheme, _, presented = Headers(scope=scope).get("authorization", "").partition(" ")
        # Compare with all keys, so that the timing reveals nothing.
        matches = [hmac.compare_digest(presented.strip().encode(), key.encode()) for key in keys]
        if scheme.lower() != "bearer" or not any(matches):
            message = "the key is missing or wrong; send it as: Authorization: Bearer KEY"
            await refuse(send, 401, message, "authentication_error", [("www-authenticate", "Bearer")])
            return
        await self._app(scope, receive, send)


class SizeGuard:
    """Rejects requests that are too large, including those without a `Content-Length`.

    Args:
        app: The application.
        limit: The largest size of a body, in bytes.
    """

    def __init__(self, app: ASGIApp, limit: int) -> None:
        self._app, self._limit = app, limit

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Forward a request, or reject it."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        length = Headers(scope=scope).get("content-length", "")
        # Refused before anything is read. Other requests are counted while they arrive, because a chunked body has no
        # length in its headers.
        if length.isdigit() and int(length) > self._limit:
            await self._refuse(send)
            return
        body: list[bytes] = []
        size = 0
        while True:
            message = await receive()
            # The client has disconnected before the end of the body.
            if message["type"] != "http.request":
                return
            body.append(message.get("body", b""))
            size += len(body[-1])
            if size > self._limit:
                await self._refuse(send)
                return
            if not message.get("more_body", False):
                break
        whole: list[Message] = [{"type": "http.request", "body": b"".join(body), "more_body": False}]

        async def replay() -> Message:
            # First the body, then what the server reports later, such as a disconnect.
            return whole.pop() if whole else await receive()

        await self._app(scope, replay, send)

    async def _refuse(self, send: Send) -> None:
        limit = f"{self._limit / 2**20:g} MiB (--max-body-mib)"
        await refuse(send, 413, f"the request is larger than {limit}", "invalid_request_error", [("connection", "close")])
