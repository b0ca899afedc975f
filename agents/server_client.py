"""Requests to a model server: a deadline for each try, further tries where one may help, connections that are shared.

All requests of a rollout run in its one event loop, however many they are.
"""

import asyncio
import json
import random
import re
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping
from email.utils import parsedate_to_datetime
from typing import Any, TypeVar

import httpx
import tenacity

from agents.engine import EngineError

CONNECT_SECONDS = 10.0
ANSWER_BYTES = 16_000_000
FIRST_TRIES = 3
"""Tries of a request while the server has never answered: most likely there is none."""
LONGEST_PAUSE = 10.0
PASSING = (408, 409, 425, 429)

T = TypeVar("T")


class ServerUnavailable(EngineError):
    """Another try may help."""

    def __init__(self, message: str, *, retry_after: float = 0.0, connected: bool = True):
        super().__init__(message)
        self.retry_after, self.connected = retry_after, connected


class RequestRefused(EngineError):
    """Another try would be refused too."""


class ServerClient:
    """Asks one server; usable in one event loop after another, whose connections close with it."""

    def __init__(self, *, request_seconds: float, patience: float, headers: Mapping[str, str] | None = None):
        """`request_seconds`: deadline of one try. `patience`: a request that a busy, failing or lost server does not
        answer is tried again, after what `Retry-After` asks for, until this many seconds are used up."""
        self.request_seconds, self.patience, self._headers = request_seconds, patience, dict(headers or {})
        self.reached = False
        """Whether the server has ever answered."""
        self._random = random.Random()  # of its own: pauses leave the global generator as it was
        self._clients: dict[asyncio.AbstractEventLoop, tuple[httpx.AsyncClient, AsyncGenerator]] = {}

    async def retrying(self, ask: Callable[..., Awaitable[T]], *arguments: Any) -> T:
        """What `ask` returns, tried again while it raises ServerUnavailable and patience lasts."""
        tries = tenacity.AsyncRetrying(
            retry=tenacity.retry_if_exception_type(ServerUnavailable), wait=self._pause, reraise=True,
            stop=tenacity.stop_any(tenacity.stop_before_delay(self.patience), self._never_reached))
        return await tries(ask, *arguments)

    async def request(self, method: str, url: str, body: Any = None) -> tuple[httpx.Response, bytes]:
        """One try. Raises ServerUnavailable where no whole answer came."""
        client = await self._client()
        content = bytearray()
        try:
            async with asyncio.timeout(self.request_seconds), client.stream(method, url, json=body) as response:
                self.reached = True
                async for part in response.aiter_bytes():
                    content += part
                    if len(content) > ANSWER_BYTES:
                        raise ServerUnavailable(f"{url} answers more than {ANSWER_BYTES:,} bytes")
        except TimeoutError:
            raise ServerUnavailable(f"{url} did not answer in {self.request_seconds:g} s") from None
        except httpx.HTTPError as error:
            raise ServerUnavailable(f"no answer from {url} ({type(error).__name__}: {error}): is it running?",
                                    connected=not isinstance(error, httpx.ConnectError | httpx.ConnectTimeout)
                                    ) from None
        return response, bytes(content)

    def _pause(self, state: tenacity.RetryCallState) -> float:
        """What the server asks for and a growing random rest, so that its clients do not come back all at once."""
        longest = min(0.5 * 2.0 ** min(state.attempt_number, 10), LONGEST_PAUSE)
        return state.outcome.exception().retry_after + self._random.uniform(0.0, longest)

    def _never_reached(self, state: tenacity.RetryCallState) -> bool:
        return not self.reached and state.attempt_number >= FIRST_TRIES

    async def _client(self) -> httpx.AsyncClient:
        """The client of the running event loop."""
        loop = asyncio.get_running_loop()
        if loop not in self._clients:
            client = httpx.AsyncClient(
                headers=self._headers,
                timeout=httpx.Timeout(None, connect=CONNECT_SECONDS),  # `request_seconds` limits the whole
                limits=httpx.Limits(max_connections=None, max_keepalive_connections=None))
            end = self._close_with(loop, client)
            self._clients[loop] = client, end
            await anext(end)
        return self._clients[loop][0]

    async def _close_with(self, loop: asyncio.AbstractEventLoop, client: httpx.AsyncClient) -> AsyncGenerator:
        """`asyncio.run` closes every asynchronous generator that has begun, and with this one the client."""
        try:
            yield
        finally:
            del self._clients[loop]
            await client.aclose()


def read_address(base_url: str) -> str:
    """The address without a slash at its end. Raises ValueError where it is none, without showing what may be secret.
    """
    try:
        url = httpx.URL(base_url)
    except httpx.InvalidURL:
        raise ValueError("the base URL must be an address such as http://127.0.0.1:8000") from None
    if url.userinfo or url.query or url.fragment:
        raise ValueError("the base URL must hold no user, password or query; keys come from the environment")
    if url.scheme not in ("http", "https") or not url.host:
        raise ValueError(f"the base URL must be an address such as http://127.0.0.1:8000, got {base_url!r}")
    return str(url).rstrip("/")


def unavailable(response: httpx.Response) -> bool:
    """Whether a status other than 200 may pass."""
    return response.status_code in PASSING or response.status_code >= 500 or response.status_code < 300


def explanation(content: bytes) -> dict[str, Any]:
    """The error object of an answer, wherever servers put it."""
    try:
        said = json.loads(content)
    except (ValueError, RecursionError):
        return {"message": content.decode("utf-8", "replace").strip() or "nothing"}
    error = said.get("error") or said if isinstance(said, dict) else said
    return error if isinstance(error, dict) else {"message": error}


def retry_after(response: httpx.Response) -> float:
    """Seconds that the server asks to wait, 0 where it asks for none; given as a number or as a date."""
    value = response.headers.get("Retry-After", "")
    if re.fullmatch(r"\d{1,9}(\.\d*)?", value):
        return float(value)
    try:
        return max(0.0, parsedate_to_datetime(value).timestamp() - time.time())
    except (ValueError, OverflowError):
        return 0.0
