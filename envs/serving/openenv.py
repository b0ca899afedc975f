"""OpenEnv's protocol: a WebSocket at `/ws` is a session with an environment of its own, closed at its end.

    {"type": "reset", "data": {"seed": 7}}        -> {"type": "observation", "data": {"observation": {...}, ...}}
    {"type": "step", "data": {"text": "..."}}     -> {"type": "observation", ...}
    {"type": "state"}                             -> {"type": "state", "data": {...}}
"""

import asyncio
import json
import uuid
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route, WebSocketRoute
from starlette.websockets import WebSocket, WebSocketDisconnect

from envs.core import TextEnv, json_value
from envs.serving.host import Full, Host, application


class Action(BaseModel):
    """What a step receives."""

    model_config = ConfigDict(extra="forbid", strict=True)
    text: str
    """The agent's whole response; the environment finds the action in it."""
    metadata: dict[str, Any] = Field(default_factory=dict)
    """OpenEnv's clients may send it; it is not read."""


class Reset(BaseModel):
    """What names the episode's task: a seed, or a place in the split; without either, any."""

    model_config = ConfigDict(extra="forbid", strict=True)
    seed: int | None = Field(default=None, ge=0)
    split: str = "train"
    task: int | None = Field(default=None, ge=0)
    episode_id: str | None = Field(default=None, max_length=255)


class Observation(BaseModel):
    """What the agent reads, and what the environment says of it."""

    text: str
    system_prompt: str | None = None
    """The rules; after a reset only."""
    success: bool
    score: float
    valid: bool
    scorable: bool
    truncated: bool
    turn: int
    task_key: str
    family: str
    info: dict[str, Any]
    """What else the environment reports."""


class State(BaseModel):
    """Where a session stands."""

    episode_id: str | None
    step_count: int
    task_key: str | None
    split: str | None
    done: bool


class Refusal(Exception):
    """A message that cannot be followed, with one of OpenEnv's error codes."""

    def __init__(self, code: str, message: str):
        super().__init__(message)
        self.code = code


class Conversation:
    """One session's messages and answers. Blocks for as long as the environment does."""

    def __init__(self, env: TextEnv):
        self._env = env
        self._episode_id: str | None = None
        self._turn, self._over = 0, True

    def answer(self, raw: str) -> dict[str, Any] | None:
        """The answer to a message; None where it closes the session. Never raises on what a client wrote."""
        try:
            return self._answer(raw)
        except Refusal as refused:
            return error(refused.code, str(refused))
        except ValidationError as invalid:
            problems = [f"{'.'.join(map(str, e['loc'])) or 'data'}: {e['msg']}" for e in invalid.errors()]
            refusal = error("VALIDATION_ERROR", "; ".join(problems))
            refusal["data"]["errors"] = invalid.errors(include_url=False, include_context=False, include_input=False)
            return refusal
        except Exception as failure:  # whatever the environment raises ends the episode, not the session
            self._over = True
            return error("EXECUTION_ERROR", f"{type(failure).__name__}: {failure}")

    def _answer(self, raw: str) -> dict[str, Any] | None:
        try:
            message = json.loads(raw)
        except (ValueError, RecursionError) as invalid:
            raise Refusal("INVALID_JSON", f"no JSON: {invalid}") from invalid
        if not isinstance(message, dict):
            raise Refusal("VALIDATION_ERROR", 'a message is an object, {"type": ..., "data": {...}}')
        data = message.get("data", {})
        match message.get("type"):
            case "reset":
                return self._reset(Reset.model_validate(data))
            case "step":
                return self._step(Action.model_validate(data))
            case "state":
                return {"type": "state", "data": self._state().model_dump()}
            case "close":
                return None
        raise Refusal("UNKNOWN_TYPE", f"there are reset, step, state and close, not {message.get('type')!r:.100}")

    def _reset(self, asked: Reset) -> dict[str, Any]:
        options: dict[str, Any] = {"split": asked.split}
        try:
            tasks = self._env.tasks(asked.split)
        except ValueError as unknown:
            raise Refusal("VALIDATION_ERROR", f"split: {unknown}") from unknown
        if asked.task is not None:
            if asked.task >= len(tasks):
                raise Refusal("VALIDATION_ERROR", f"task: {asked.split} has the tasks 0 to {len(tasks) - 1}")
            options["task"] = tasks[asked.task]
        self._turn, self._over = 0, True  # should reset raise
        text, info = self._env.reset(seed=asked.seed, options=options)
        self._episode_id, self._over = asked.episode_id or uuid.uuid4().hex, False
        return self._observation(text, info, None, system_prompt=self._env.system_prompt)

    def _step(self, action: Action) -> dict[str, Any]:
        if self._over:
            raise Refusal("SESSION_ERROR", "no episode is under way: it is over or never began; reset first")
        text, reward, terminated, truncated, info = self._env.step(self._env.parse(action.text).text)
        self._turn, self._over = info["turn"], terminated or truncated
        return self._observation(text, info, reward, truncated=truncated)

    def _observation(self, text: str, info: dict[str, Any], reward: float | None, *, truncated: bool = False,
                     system_prompt: str | None = None) -> dict[str, Any]:
        known = {key: info[key] for key in Observation.model_fields if key in info and key != "info"}
        more = {key: value for key, value in info.items() if key not in known}
        shown = Observation(text=text, system_prompt=system_prompt, truncated=truncated, info=more, **known)
        return {"type": "observation", "data": {"observation": dict(shown), "reward": reward, "done": self._over}}

    def _state(self) -> State:
        task = self._env.task
        return State(episode_id=self._episode_id, step_count=self._turn, task_key=task and task.key,
                     split=task and task.split, done=self._over)


def error(code: str, message: str) -> dict[str, Any]:
    """OpenEnv's error message."""
    return {"type": "error", "data": {"message": message, "code": code}}


def openenv_app(host: Host, *, name: str, bound_to: str) -> Starlette:
    """The server of `name`: `/ws`, and `/health`, `/metadata` and `/schema` as OpenEnv has them. Its `/reset` and
    `/step` are not here: each of those requests is an environment of its own, which plays no episode."""

    async def session(socket: WebSocket) -> None:
        try:
            await socket.accept()
            await _serve(socket, host)
        except WebSocketDisconnect:
            return  # the client has gone, in the middle perhaps

    async def metadata(request: Request) -> JSONResponse:
        return JSONResponse({"name": name, "description": f"{name}, a turngym environment"})

    async def schema(request: Request) -> JSONResponse:
        return JSONResponse({"action": Action.model_json_schema(), "observation": Observation.model_json_schema(),
                             "state": State.model_json_schema()})

    return application([WebSocketRoute("/ws", session), Route("/metadata", metadata), Route("/schema", schema)],
                       host=bound_to)


async def _serve(socket: WebSocket, host: Host) -> None:
    """A session from its beginning to its end, with an environment of its own."""
    try:
        env = await host.open()
    except Exception as failure:  # whatever a constructor raises is told to the client
        await _leave(socket, error("CAPACITY_REACHED" if isinstance(failure, Full) else "FACTORY_ERROR", str(failure)))
        return
    try:
        await _talk(socket, host, Conversation(env))
    finally:
        await asyncio.shield(host.close(env))


async def _talk(socket: WebSocket, host: Host, conversation: Conversation) -> None:
    while True:
        try:
            message = await asyncio.wait_for(socket.receive(), host.idle_seconds)
        except TimeoutError:
            await _leave(socket, error("SESSION_ERROR", f"closed after {host.idle_seconds:g} s without a message"))
            return
        if message["type"] == "websocket.disconnect":
            return
        raw = message.get("text")
        answer = error("INVALID_JSON", "a message is text, not bytes") if raw is None else \
            await host.run(conversation.answer, raw)
        if answer is None:
            await socket.close()
            return
        await socket.send_text(json.dumps(answer, default=json_value))


async def _leave(socket: WebSocket, answer: dict[str, Any]) -> None:
    await socket.send_text(json.dumps(answer))
    await socket.close(1013 if answer["data"]["code"] == "CAPACITY_REACHED" else 1011)
