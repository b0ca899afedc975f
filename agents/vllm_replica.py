"""One vLLM server as an engine speaks to it: token ids in, token ids out, and new weights in between."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Annotated, Any, Protocol, TypeVar

import numpy as np
from pydantic import BaseModel, Field, TypeAdapter, ValidationError, model_validator

from agents.server_client import (
    RequestRefused,
    ServerClient,
    ServerUnavailable,
    explanation,
    read_address,
    retry_after,
    unavailable,
)
from agents.vllm_server import SERVED_NAME, VLLMServer

ADAPTER_NAME = "adapter"
T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class Sample:
    """What a replica sampled for one prompt."""

    token_ids: list[int]
    logprobs: list[float]
    finish_reason: str
    """vLLM's: `stop`, `length`, `abort`, `error`."""
    versions: list[tuple[str, int]]
    """The weight version of each span of tokens and the index that it ends before."""


class Replica(Protocol):
    """One vLLM engine, wherever it runs. Its methods raise EngineError."""

    name: str
    """Where it is, for messages."""
    ours: bool
    """Whether we may end it and start it again."""
    alive: bool
    """Whether its process runs, as far as we can see."""
    last_words: str
    """The end of its log, if we have that."""
    running: int
    """Requests under way."""
    current: bool
    """Whether it holds the weights that it was sent; false also where it may be lost."""

    async def start(self) -> int:
        """Start it if it is ours, and wait until it serves. Returns the tokens that it reads at most."""

    async def end(self) -> None:
        """End it if it is ours."""

    async def retrying(self, ask: Callable[..., Awaitable[T]], *arguments: Any) -> T:
        """What `ask` returns, tried again where that may help."""

    async def generate(self, prompt_ids: list[int], sampling: dict[str, Any], salt: str) -> Sample:
        """Sample with vLLM's sampling parameters. What is cached for other salts is not used."""

    async def score(self, ids: list[int]) -> np.ndarray:
        """Log-probability of each id given those before it; the first is 0. # float32 [length]"""

    async def pause(self, keep_cache: bool) -> None:
        """Hold what is running, to go on after `resume`: with the keys and values that it has, or computing them anew.
        """

    async def resume(self) -> None: ...

    async def update(self, info: dict[str, Any]) -> None:
        """Take the weights that the transfer backend finds by `info`, all of them."""

    async def load_adapter(self, folder: str) -> None:
        """Sample with the LoRA adapter in `folder` from now on, in place of the one before."""

    async def version(self) -> str:
        """Of the weights that it holds."""

    async def set_version(self, version: str) -> None: ...

    async def sleep(self, level: int) -> None:
        """Free its GPU memory: 1 keeps the weights on the host, 2 forgets them."""

    async def wake(self, tag: str) -> None:
        """Take the memory of `weights` or `kv_cache` again."""

    def close(self) -> None:
        """End it if it is ours, and let go of it."""


class _TokenLogprob(BaseModel):
    token_id: int
    logprob: float = Field(le=0.0, allow_inf_nan=False)


class _Logprobs(BaseModel):
    content: list[_TokenLogprob]


class _Span(BaseModel):
    version: str
    start: int
    end: int


class _Choice(BaseModel):
    token_ids: list[Annotated[int, Field(ge=0)]]
    logprobs: _Logprobs
    finish_reason: str
    weight_versions: list[_Span] | None

    @model_validator(mode="after")
    def _whole(self) -> "_Choice":
        if [one.token_id for one in self.logprobs.content] != self.token_ids:
            raise ValueError(f"{len(self.token_ids)} token ids, but log-probabilities of others")
        spans = self.weight_versions or []
        bounds = [0, *(span.end for span in spans)]
        if self.token_ids and (bounds != [*(span.start for span in spans), len(self.token_ids)]
                               or bounds != sorted(set(bounds))):
            raise ValueError(f"the weight versions do not cover {len(self.token_ids)} token ids")
        return self


class _PromptLogprob(BaseModel):
    logprob: float = Field(allow_inf_nan=False)


class _Answer(BaseModel):
    choices: Annotated[list[_Choice], Field(min_length=1, max_length=1)]
    prompt_logprobs: list[dict[int, _PromptLogprob] | None] | None = None


class _WeightInfo(BaseModel):
    weight_version: str


class _Model(BaseModel):
    id: str
    max_model_len: int | None = None


class _Models(BaseModel):
    data: Annotated[list[_Model], Field(min_length=1)]


class _ModelConfig(BaseModel):
    logprobs_mode: str


class _Config(BaseModel):
    model_config_: _ModelConfig = Field(alias="model_config")


class _Info(BaseModel):
    vllm_config: _Config


class ServerReplica:
    """A vLLM server: one of ours, or one that runs somewhere at `url`."""

    def __init__(self, server: VLLMServer | None = None, *, url: str = "", request_seconds: float = 600.0,
                 patience: float = 120.0):
        """`request_seconds`, `patience`: see `ServerClient`. Raises ValueError for a `url` that is none."""
        self.server, self._url = server, "" if server else read_address(url)
        self.client = ServerClient(request_seconds=request_seconds, patience=patience)
        self.ours, self.running, self.current = server is not None, 0, True
        self._model = SERVED_NAME

    @property
    def name(self) -> str:
        return self.server.url if self.server else self._url

    @property
    def alive(self) -> bool:
        return self.server is None or self.server.alive

    @property
    def last_words(self) -> str:
        return f"The end of {self.server.log}:\n{self.server.last_words()}" if self.server else ""

    async def start(self) -> int:
        if self.server is not None:
            await asyncio.to_thread(self.server.start)
        model = _read(_Models, await self.client.retrying(self._ask, "GET", "/v1/models"), self.name).data[0]
        if self.server is None:
            mode = _read(_Info, await self._ask("GET", "/server_info?config_format=json"), self.name
                         ).vllm_config.model_config_.logprobs_mode
            if mode != "processed_logprobs":
                raise RequestRefused(f"{self.name} gives {mode}: start it with --logprobs-mode processed_logprobs, so "
                                     "that log-probabilities are those of the distribution that it samples from")
        self._model = model.id
        return model.max_model_len or 2**31

    async def end(self) -> None:
        await asyncio.to_thread(self.close)

    async def retrying(self, ask: Callable[..., Awaitable[T]], *arguments: Any) -> T:
        return await self.client.retrying(ask, *arguments)

    async def generate(self, prompt_ids: list[int], sampling: dict[str, Any], salt: str) -> Sample:
        choice = (await self._generate(prompt_ids, sampling, salt)).choices[0]
        return Sample(choice.token_ids, [one.logprob for one in choice.logprobs.content], choice.finish_reason,
                      [(span.version, span.end) for span in choice.weight_versions or []])

    async def score(self, ids: list[int]) -> np.ndarray:
        sampling = {"temperature": 0.0, "max_tokens": 1, "logprobs": 0, "prompt_logprobs": 0}
        answer = await self.client.retrying(self._generate, ids, sampling, "score")
        found = answer.prompt_logprobs or []
        if len(found) != len(ids) or any(i not in (one or {}) for i, one in zip(ids[1:], found[1:])):
            raise ServerUnavailable(f"{self.name} did not score all of {len(ids)} tokens")
        return np.array([0.0, *(one[i].logprob for i, one in zip(ids[1:], found[1:]))], np.float32)

    async def pause(self, keep_cache: bool) -> None:
        await self._ask("POST", f"/pause?mode=keep&clear_cache={'false' if keep_cache else 'true'}")

    async def resume(self) -> None:
        await self._ask("POST", "/resume")

    async def update(self, info: dict[str, Any]) -> None:
        await self._ask("POST", "/start_weight_update")
        await self._ask("POST", "/update_weights", {"update_info": info})
        await self._ask("POST", "/finish_weight_update", {})

    async def load_adapter(self, folder: str) -> None:
        await self._ask("POST", "/v1/load_lora_adapter",
                        {"lora_name": ADAPTER_NAME, "lora_path": folder, "load_inplace": True})
        self._model = ADAPTER_NAME

    async def version(self) -> str:
        return _read(_WeightInfo, await self._ask("GET", "/weight_info"), self.name).weight_version

    async def set_version(self, version: str) -> None:
        await self._ask("POST", "/update_weight_version", {"new_version": version})

    async def sleep(self, level: int) -> None:
        await self._ask("POST", f"/sleep?level={level}")

    async def wake(self, tag: str) -> None:
        await self._ask("POST", f"/wake_up?tags={tag}")

    async def world_size(self) -> int:
        """Its workers."""
        return _read(TypeAdapter(dict[str, int]), await self._ask("GET", "/get_world_size"),
                     self.name)["world_size"]

    def close(self) -> None:
        if self.server is not None:
            self.server.close()

    async def _generate(self, prompt_ids: list[int], sampling: dict[str, Any], salt: str) -> _Answer:
        content = await self._ask("POST", "/inference/v1/generate", {
            "model": self._model, "token_ids": prompt_ids, "sampling_params": sampling, "cache_salt": salt})
        return _read(_Answer, content, f"{self.name}/inference/v1/generate")

    async def _ask(self, method: str, path: str, body: Any = None) -> bytes:
        """One try: what changes the server is never tried again, since half of it may be done."""
        response, content = await self.client.request(method, self.name + path, body)
        if response.status_code == 200:
            return content
        error = explanation(content)
        said = str(error.get("message") or error.get("detail") or error)[:300]
        message = f"{self.name}{path} answers {response.status_code}: {said!r}"
        if response.status_code == 404 and self._model == ADAPTER_NAME:
            raise ServerUnavailable(f"{message}: it lost its adapter", connected=False)
        if unavailable(response):
            raise ServerUnavailable(message, retry_after=retry_after(response))
        if response.status_code in (403, 404, 405):
            message += (". Is it a vLLM server of 0.32 with --enable-scale-out and VLLM_SERVER_DEV_MODE=1, as "
                        "docs/engines.md says?")
        raise RequestRefused(message)


def _read(model: type[T] | TypeAdapter[T], content: bytes, place: str) -> T:
    try:
        return (model if isinstance(model, TypeAdapter) else TypeAdapter(model)).validate_json(content)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(map(str, first["loc"]))
        raise ServerUnavailable(f"{place} answers what it should not ({where and where + ': '}{first['msg']}): "
                                f"{content[:300].decode('utf-8', 'replace')!r}") from None
