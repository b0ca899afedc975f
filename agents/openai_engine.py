"""Any server that speaks OpenAI's chat completions, as an agent: text in, text out, for evaluation.

Such a server gives no token ids and no log-probabilities, so its turns hold none and cannot be trained. What it answers
is an action only where it is whole: an error, half a body or garbage fails the episode, and is never a reward.
"""

import os
import re
from collections.abc import Sequence
from typing import Annotated, Any, Literal

import httpx
import numpy as np
from pydantic import BaseModel, Field, ValidationError, model_validator

from agents.agent import Response
from agents.context import Message
from agents.engine import EngineError
from agents.server_client import (
    RequestRefused,
    ServerClient,
    ServerUnavailable,
    explanation,
    read_address,
    retry_after,
    unavailable,
)
from envs.core import TextEnv, clean_text
from rewards.tags import OPENED_IN_THE_PROMPT, THINKING

KEY_VARIABLE = "OPENAI_API_KEY"
MOST_STOPS = 4
"""OpenAI takes no more; the response is cut here at the others."""
REPLACEMENTS = {"max_tokens": "max_completion_tokens", "stop": None, "seed": None}
"""What is sent instead of a parameter that a model does not support; None: nothing. A response is cut here anyway."""
ALWAYS_REFUSED = (401, 402, 404, 405)
"""What is refused so (key, credit, model, address) is refused for every request."""
CONTEXT_FULL = re.compile(r"context[ _](length|size|window)|prompt is too long|input token count", re.IGNORECASE)
CLOSING_TAG = re.compile(r"</([\w-]+)>")


class ParameterUnsupported(RequestRefused):
    """The model does not know one of the request's parameters."""

    def __init__(self, message: str, parameter: str):
        super().__init__(message)
        self.parameter = parameter


class ContextFull(EngineError):
    """The conversation and `max_tokens` are longer than the model's context."""


class _Message(BaseModel):
    """Its reasoning, under whatever name, is not read: it is no part of what the model says."""

    role: str | None = None
    content: str | None = None
    tool_calls: Any = None

    @model_validator(mode="after")
    def _says_something(self) -> "_Message":
        if not self.model_fields_set:
            raise ValueError("a message without role and content")
        return self


class _Choice(BaseModel):
    message: _Message
    finish_reason: Literal["stop", "length", "tool_calls", "function_call"]
    stop_reason: str | int | None = None
    """vLLM: the stop text that ended the response; None where it ended by itself."""
    matched_stop: str | int | None = None
    """SGLang: the same; a token id where it ended by itself."""


class _Answer(BaseModel):
    choices: Annotated[list[_Choice], Field(min_length=1)]


class OpenAIEngine:
    """A model behind `POST {base_url}/chat/completions`.

    The key is the environment variable OPENAI_API_KEY; without one none is sent. An episode has one request under way,
    so a rollout's `concurrency` bounds them; they share the connections of their event loop, which close with it.
    """

    def __init__(self, base_url: str, model: str, *, request_seconds: float = 300.0, patience: float = 120.0):
        """`request_seconds` and `patience`: see `ServerClient`.

        Raises ValueError for an address or a key that cannot be one.
        """
        self.url, self.model = f"{read_address(base_url)}/chat/completions", model
        self.refusal: str | None = None
        """Why every further request is bound to fail; none is sent any more."""
        self._key = _read_key()
        self._replaced: dict[str, str | None] = {}
        self._server = ServerClient(request_seconds=request_seconds, patience=patience,
                                    headers={"Authorization": f"Bearer {self._key}"} if self._key else {})

    async def complete(self, messages: Sequence[Message], *, max_tokens: int, temperature: float, seed: int,
                       stop: Sequence[str]) -> tuple[str, str]:
        """What the model says next, without its thinking and with the stop text that ended it, and the finish reason:
        `stop`, or `length` where `max_tokens` or the context is used up. A native tool call is no text.

        Raises EngineError.
        """
        body = {"model": self.model, "messages": list(messages), "temperature": temperature, "seed": seed % 2**31,
                **({"stop": list(stop[:MOST_STOPS])} if stop else {})}
        try:
            choice = await self._ask({**body, "max_tokens": max_tokens})
        except ContextFull:
            try:  # without a limit the response gets the room that is left, which is less than max_tokens
                choice = await self._ask(body)
            except ContextFull:
                return "", "length"
        return _spoken(choice, stop)

    async def _ask(self, body: dict[str, Any]) -> _Choice:
        if self.refusal:
            raise EngineError(self.refusal)
        while True:
            names = {name: self._replaced.get(name, name) for name in body}
            sent = {new: body[name] for name, new in names.items() if new}
            try:
                return await self._server.retrying(self._post, sent)
            except ParameterUnsupported as refused:
                if refused.parameter not in REPLACEMENTS.keys() & names.values():
                    raise
                self._replaced[refused.parameter] = REPLACEMENTS[refused.parameter]
            except ServerUnavailable as error:
                if not (error.connected and self._server.reached):
                    self.refusal = str(error)
                raise

    async def _post(self, body: dict[str, Any]) -> _Choice:
        response, content = await self._server.request("POST", self.url, body)
        if response.status_code != 200:
            raise self._failure(response, content)
        try:
            return _Answer.model_validate_json(content).choices[0]
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            where = ".".join(map(str, first["loc"]))
            raise ServerUnavailable(f"{self.url} answers no chat completion ({where and where + ': '}{first['msg']}): "
                               f"{self._readable(content)}") from None

    def _failure(self, response: httpx.Response, content: bytes) -> EngineError:
        """The error that a status other than 200 is."""
        status, error = response.status_code, explanation(content)
        said = self._readable(str(error.get("message") or error.get("detail") or error).encode())
        message, code = f"{self.url} answers {status}: {said}", error.get("code")
        if code == "insufficient_quota":
            self.refusal = message
        elif unavailable(response):
            pause = retry_after(response)
            return ServerUnavailable(message + (f" (and asks to wait {pause:.0f} s)" if pause else ""),
                                     retry_after=pause)
        elif status in (400, 413, 422) and CONTEXT_FULL.search(f"{code} {error.get('type')} {said}"):
            return ContextFull(message)
        if status in (401, 403):
            message += f". Set {KEY_VARIABLE}" if not self._key else f". Check the key in {KEY_VARIABLE}"
        elif status < 400 or status in (404, 405):
            message += f". Is there a model {self.model!r}, and is the base URL complete (most end in /v1)?"
        if status < 400 or status in ALWAYS_REFUSED:
            self.refusal = message
        return ParameterUnsupported(message, str(error.get("param"))) if code == "unsupported_parameter" \
            else RequestRefused(message)

    def _readable(self, content: bytes) -> str:
        """The beginning of what the server said. It may have sent the key back, which nobody is to see."""
        text = content.decode("utf-8", "replace")
        return repr((text.replace(self._key, "***") if self._key else text)[:300])


class ChatAgent:
    """A model behind a chat server. For evaluation only: its turns hold no token ids, and training refuses those."""

    def __init__(self, engine: OpenAIEngine, *, temperature: float = 1.0, max_response_tokens: int = 512,
                 window: int | None = None):
        """`window`: a prompt holds the first observation and the last `window` turns; None: all."""
        if window is not None and window < 1:
            raise ValueError(f"a window holds at least the last turn: window must be 1 or more, got {window}")
        self.engine, self.temperature, self.window = engine, temperature, window
        self.max_response_tokens = max_response_tokens

    def start(self, env: TextEnv, observation: str, seed: int) -> "ChatActor":
        return ChatActor(self, env, observation, seed)


class ChatActor:
    """One episode of a `ChatAgent`."""

    breaks = 0

    def __init__(self, agent: ChatAgent, env: TextEnv, observation: str, seed: int):
        self._agent, self._stop, self._seed, self._turn = agent, env.stop, seed, 0
        self._opening: list[Message] = [{"role": "system", "content": env.system_prompt}] if env.system_prompt else []
        self._opening.append({"role": "user", "content": observation})
        self._recent: list[Message] = []

    async def act(self) -> Response:
        text, finish_reason = await self._agent.engine.complete(
            self._opening + self._recent, max_tokens=self._agent.max_response_tokens, stop=self._stop,
            temperature=self._agent.temperature, seed=self._seed + self._turn)
        self._turn += 1
        no_ids = np.zeros(0, np.int64)
        return Response(text=text, prompt_ids=no_ids, response_ids=no_ids, logprobs=np.zeros(0, np.float32),
                        finish_reason=finish_reason)

    def observe(self, response: Response, observation: str) -> None:
        self._recent += [{"role": "assistant", "content": response.text}, {"role": "user", "content": observation}]
        if self._agent.window is not None:
            self._recent = self._recent[-2 * self._agent.window:]


def _read_key() -> str:
    key = os.environ.get(KEY_VARIABLE, "").strip()
    if not re.fullmatch(r"[!-~]*", key):  # else an error of the HTTP library would show it
        raise ValueError(f"{KEY_VARIABLE} holds a space, a control or a non-ASCII character: it is no key")
    return key


def _spoken(choice: _Choice, stop: Sequence[str]) -> tuple[str, str]:
    """The text and the finish reason of a response as `TextEnv.stop` wants it: it ends with the first stop text."""
    whole = clean_text(choice.message.content or "")
    text = OPENED_IN_THE_PROMPT.sub("", THINKING.sub("", whole))
    if text != whole:
        text = text.lstrip()
    ends = [text.index(one) + len(one) for one in stop if one in text]
    if ends:
        return text[:min(ends)], "stop"
    if choice.finish_reason == "length":
        return text, "length"
    return text + (_dropped_stop(choice, text, stop) if text and choice.finish_reason == "stop" else ""), "stop"


def _dropped_stop(choice: _Choice, text: str, stop: Sequence[str]) -> str:
    """The stop text that ended a response and that the server cut off; empty where it ended by itself.

    Where the server does not say, it is the one that closes the tag opened last, or the only one if that is no tag.
    """
    if choice.model_fields_set & {"stop_reason", "matched_stop"}:
        return next((one for one in stop if one in (choice.stop_reason, choice.matched_stop)), "")
    tags = {one: match[1] for one in stop if (match := CLOSING_TAG.fullmatch(one))}
    if not tags:
        return stop[0] if len(stop) == 1 else ""
    opened = {one: max(text.rfind(f"<{tag}>"), text.rfind(f"<{tag} ")) for one, tag in tags.items()}
    last = max(opened, key=opened.get)
    return last if opened[last] >= 0 else ""
