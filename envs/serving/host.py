"""What all servers share: environments of sessions, their number and their threads; who may send requests."""

import asyncio
import ipaddress
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from urllib.parse import urlsplit

from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse
from starlette.routing import BaseRoute, Route
from starlette.types import ASGIApp, Receive, Scope, Send

from envs.core import TextEnv

BODY_BYTES = 1_000_000
"""The longest request and the longest WebSocket message."""


class Full(Exception):
    """All sessions are taken; says how many there are."""


class Host:
    """Makes and closes the environments of sessions, each in a thread, so that a slow one holds up no other."""

    def __init__(self, make: Callable[[], TextEnv], *, max_sessions: int = 64, idle_seconds: float = 600.0):
        """Raises ValueError for a limit that is not positive."""
        if max_sessions < 1 or not idle_seconds > 0:
            raise ValueError(f"max-sessions must be at least 1 and idle-seconds positive, got {max_sessions} and "
                             f"{idle_seconds}")
        self.max_sessions, self.idle_seconds = max_sessions, idle_seconds
        self.sessions = 0
        self._make = make
        self._threads = ThreadPoolExecutor(max_sessions, thread_name_prefix="session")

    async def run(self, call: Callable, *arguments: Any) -> Any:
        """What `call` returns or raises, from a thread."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, call, *arguments)

    async def open(self) -> TextEnv:
        """An environment of one's own. Raises Full, and what its constructor raises."""
        if self.sessions >= self.max_sessions:
            raise Full(f"all {self.max_sessions} sessions are taken: try again later, or start the server with a "
                       "larger --max-sessions")
        self.sessions += 1
        try:
            return await self.run(self._make)
        except BaseException:
            self.sessions -= 1
            raise

    async def close(self, env: TextEnv) -> None:
        """Give an environment back, for good."""
        try:
            await self.run(env.close)
        finally:
            self.sessions -= 1


class SameOrigin:
    """Refuses what the pages of other sites send through a person's browser."""

    def __init__(self, app: ASGIApp):
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] in ("http", "websocket"):
            headers = Headers(scope=scope)
            origin = headers.get("origin")
            if origin is not None and urlsplit(origin).netloc != headers.get("host"):
                await PlainTextResponse("requests of other sites are refused", 403)(scope, receive, send)
                return
        await self.app(scope, receive, send)


def application(routes: Sequence[BaseRoute], *, host: str) -> Starlette:
    """The routes and `/health`, guarded. On loopback only requests to a local name are answered, so that no site can
    reach the server under a name of its own."""
    guards = [Middleware(SameOrigin)]
    if is_loopback(host):
        guards.insert(0, Middleware(TrustedHostMiddleware, allowed_hosts=["localhost", "127.0.0.1", "[::1]", host],
                                    www_redirect=False))
    return Starlette(routes=[Route("/health", _health), *routes], middleware=guards)


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches a server that is bound to `host`."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


async def read_body(request: Request) -> bytes:
    """Raises HTTPException 413 for more than `BODY_BYTES`."""
    body = bytearray()
    async for part in request.stream():
        body += part
        if len(body) > BODY_BYTES:
            raise HTTPException(413, f"the request is longer than {BODY_BYTES:,} bytes")
    return bytes(body)


async def _health(request: Request) -> JSONResponse:
    return JSONResponse({"status": "healthy"})
