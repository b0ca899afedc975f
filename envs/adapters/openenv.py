"""The environment of an OpenEnv server, one WebSocket session each.

    envs.make("turngym/OpenEnv-v0", server="http://127.0.0.1:8000")
    envs.make("turngym/OpenEnv-v0", server="http://127.0.0.1:8000", action_field="message")
"""

import json
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any
from urllib.parse import urlsplit

import numpy as np

from envs.adapters.foreign import ForeignEnv, seed_tasks
from envs.core import Outcome, Task

try:
    from websockets.exceptions import WebSocketException
    from websockets.sync.client import ClientConnection, connect
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(f'{error}; pip install "turngym[interop]" installs what OpenEnv servers need',
                              name=error.name) from error

MESSAGE_BYTES = 10_000_000


class ServerError(RuntimeError):
    """The OpenEnv server is down, late or answers something else. An error of the environment, never a reward."""


class OpenEnv(ForeignEnv):
    """The response is sent as one field of the action. A response that the server's action type refuses is an invalid
    action; every other failure of the server is a `ServerError`."""

    max_turns = 50

    def __init__(self, *, server: str, action_field: str | None = "text", observation_field: str = "text",
                 seconds: float = 60.0, max_turns: int | None = None):
        """`server`: its address. `action_field`: the field that receives the response; None: the response is a JSON
        object of all fields. `observation_field`: the one that is shown; without it the whole observation, as JSON.
        `seconds`: the limit of each request. Raises ValueError for an address that is none."""
        super().__init__(max_turns=max_turns)
        parts = urlsplit(server)
        if parts.scheme not in ("http", "https", "ws", "wss") or not parts.hostname:
            raise ValueError(f"server must be an address such as http://127.0.0.1:8000, got {server!r}")
        if seconds <= 0:
            raise ValueError(f"seconds must be positive, got {seconds}")
        self.server, self.seconds = server, seconds
        self.action_field, self.observation_field = action_field, observation_field
        scheme, path = parts.scheme.replace("http", "ws"), parts.path.rstrip("/").removesuffix("/ws")
        self._url = f"{scheme}://{parts.netloc}{path}/ws"
        self._connection: ClientConnection | None = None
        self._closing = ExitStack()

    def __getstate__(self) -> dict[str, Any]:
        # An open session cannot be copied, only played again.
        return {**self.__dict__, "_connection": None, "_closing": ExitStack()}

    def tasks(self, split: str) -> Sequence[Task]:
        return seed_tasks(split, self.env_id)

    def close(self) -> None:
        self._connection = None
        self._closing.close()

    def _reset(self, task: Task, rng: np.random.Generator) -> str:
        answer = self._ask({"type": "reset", "data": {"seed": task.seed}})
        if answer["type"] == "error":
            raise ServerError(f"{self._url} cannot reset: {_said(answer)}")
        prompt = answer["data"]["observation"].get("system_prompt")
        if isinstance(prompt, str):
            self.system_prompt = prompt
        return self._shown(answer["data"]["observation"])

    def _step(self, action: str) -> Outcome:
        if self._connection is None:  # a copy, whose session is the original's
            earlier = self._actions[:-1]
            self._reset(self.task, np.random.default_rng())
            for said in earlier:
                self._play(said)
        return self._play(action)

    def _play(self, action: str) -> Outcome:
        fields: Any = {self.action_field: action}
        if self.action_field is None:
            try:
                fields = json.loads(action)
            except (ValueError, RecursionError):
                fields = None
            if not isinstance(fields, dict):
                return Outcome(observation="Reply with one JSON object.", valid=False)
        answer = self._ask({"type": "step", "data": fields})
        if answer["type"] == "error":
            if answer["data"].get("code") == "VALIDATION_ERROR" and not self._unknown_field(answer["data"]):
                return Outcome(observation=_said(answer), valid=False)
            hint = f"; is action_field={self.action_field!r} right?" if "errors" in answer["data"] else ""
            raise ServerError(f"{self._url} fails at a step: {_said(answer)}{hint}")
        data = answer["data"]
        observation, done = data["observation"], data.get("done") is True
        truncated = done and observation.get("truncated") is True
        reward = 0.0 if data.get("reward") is None else data["reward"]
        outcome = self.outcome(self._shown(observation), reward, terminated=done and not truncated, truncated=truncated,
                               info=observation)
        return replace(outcome, valid=observation.get("valid") is not False,
                       scorable=observation.get("scorable") is not False)

    def _unknown_field(self, refusal: dict[str, Any]) -> bool:
        """Whether the server knows no `action_field`, which no response can mend."""
        errors = refusal.get("errors")
        return isinstance(errors, list) and any(
            isinstance(e, dict) and e.get("type") == "extra_forbidden" and e.get("loc") == [self.action_field]
            for e in errors)

    def _ask(self, message: dict[str, Any]) -> dict[str, Any]:
        """The server's answer, of type `observation` or `error`. Raises ServerError."""
        deadline = time.monotonic() + self.seconds
        try:
            if self._connection is None:
                self._connection = self._closing.enter_context(connect(
                    self._url, open_timeout=self.seconds, close_timeout=2.0, proxy=None, max_size=MESSAGE_BYTES))
            self._connection.send(json.dumps(message))
            raw = self._connection.recv(timeout=max(deadline - time.monotonic(), 0.001))
        except (OSError, WebSocketException) as error:  # TimeoutError is an OSError
            self.close()
            raise ServerError(f"no answer from the OpenEnv server {self._url} ({type(error).__name__}: {error}): is it "
                              "running?") from error
        try:
            answer = json.loads(raw)
        except (ValueError, RecursionError) as error:
            answer = f"no JSON, {error}"
        if not _well_formed(answer):
            self.close()
            raise ServerError(f"{self._url} answers what no OpenEnv server does: {answer!r:.200}")
        return answer

    def _shown(self, observation: dict[str, Any]) -> str:
        text = observation.get(self.observation_field)
        return text if isinstance(text, str) else json.dumps(observation)


def _well_formed(answer: Any) -> bool:
    if not isinstance(answer, dict) or not isinstance(data := answer.get("data"), dict):
        return False
    if answer.get("type") == "error":
        return True
    return answer.get("type") == "observation" and isinstance(data.get("observation"), dict)


def _said(answer: dict[str, Any]) -> str:
    return f"{answer['data'].get('message', 'no reason given')} ({answer['data'].get('code', 'no code')})"
