"""An environment whose observations are HTML pages, for a person's browser: each visit is a session."""

import asyncio
import re
import secrets
from dataclasses import dataclass, field
from urllib.parse import parse_qs

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import HTMLResponse, RedirectResponse
from starlette.routing import Route

from envs.core import TextEnv
from envs.serving.host import Full, Host, application, read_body

HEADERS = {
    # Pages bring their own handlers of clicks; nothing is loaded from anywhere, and forms lead here only.
    "Content-Security-Policy": "default-src 'none'; script-src 'unsafe-inline'; form-action 'self'; "
                               "frame-ancestors 'none'",
    "Cache-Control": "no-store", "X-Content-Type-Options": "nosniff", "Referrer-Policy": "same-origin",
}


@dataclass
class Visit:
    """One person's episode."""

    env: TextEnv
    page: str
    over: bool = False
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    timer: asyncio.TimerHandle | None = None


class Pages:
    """`/` begins an episode (`/?split=test&task=3` that one); its page, at `/session/TOKEN`, takes the forms."""

    def __init__(self, host: Host):
        self._host = host
        self._visits: dict[str, Visit] = {}
        self._closing: set[asyncio.Task] = set()

    async def begin(self, request: Request) -> RedirectResponse:
        try:
            env = await self._host.open()
        except Full as full:
            raise HTTPException(503, str(full)) from full
        try:
            page = await self._host.run(_first_page, env, dict(request.query_params))
        except BaseException:
            await self._host.close(env)
            raise
        token = secrets.token_urlsafe(16)
        self._visits[token] = Visit(env, page)
        self._rest(token)
        return RedirectResponse(f"/session/{token}", 303, HEADERS)

    async def show(self, request: Request) -> HTMLResponse:
        return HTMLResponse(self._visit(request).page, headers=HEADERS)

    async def act(self, request: Request) -> RedirectResponse:
        visit = self._visit(request)
        action = _action(await read_body(request))
        async with visit.lock:  # two clicks at once are one after the other
            if visit.over:
                raise HTTPException(409, "this episode is over: begin another one at /")
            page, _, terminated, truncated, _ = await self._host.run(visit.env.step, action)
            visit.page, visit.over = page, terminated or truncated
        return RedirectResponse(request.url.path, 303, HEADERS)  # so that reloading the page sends nothing again

    def _visit(self, request: Request) -> Visit:
        token = request.path_params["token"]
        if token not in self._visits:
            raise HTTPException(404, "no such session, or it was left idle for too long: begin another one at /")
        self._rest(token)
        return self._visits[token]

    def _rest(self, token: str) -> None:
        """Close the visit when nothing is heard of it for the idle limit from now on."""
        visit = self._visits[token]
        if visit.timer is not None:
            visit.timer.cancel()
        visit.timer = asyncio.get_running_loop().call_later(self._host.idle_seconds, self._end, token)

    def _end(self, token: str) -> None:
        task = asyncio.ensure_future(self._host.close(self._visits.pop(token).env))
        self._closing.add(task)  # the loop itself keeps no reference
        task.add_done_callback(self._closing.discard)


def pages_app(host: Host, *, bound_to: str) -> Starlette:
    """The server of the pages. Unknown sessions are answered with 404, a click after the end with 409, a person too
    many with 503."""
    pages = Pages(host)
    return application([Route("/", pages.begin), Route("/session/{token}", pages.show),
                        Route("/session/{token}", pages.act, methods=["POST"])], host=bound_to)


def _first_page(env: TextEnv, query: dict[str, str]) -> str:
    options: dict = {"split": query.get("split", "train")}
    try:
        tasks = env.tasks(options["split"])
    except ValueError as unknown:
        raise HTTPException(400, str(unknown)) from unknown
    if "task" in query:
        if not re.fullmatch("[0-9]{1,9}", query["task"]) or int(query["task"]) >= len(tasks):
            raise HTTPException(400, f"task is a number from 0 to {len(tasks) - 1}")
        options["task"] = tasks[int(query["task"])]
    return env.reset(options=options)[0]


def _action(body: bytes) -> str:
    """The action that a form's button stands for."""
    fields = parse_qs(body.decode("utf-8", "replace"), keep_blank_values=True)
    action = fields.get("action", [""])[0]
    if not action:
        raise HTTPException(400, "the form names no action")
    return f"search[{fields.get('search_query', [''])[0]}]" if action == "search" else action
