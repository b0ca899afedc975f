"""Who acts: a model behind an engine, or a script (gold, random, noop) that serves as a reference or a demonstrator."""

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from agents.context import ChatTemplate, Context
from agents.engine import Engine, Request
from agents.models import Policy
from envs.core import Mistake, TextEnv


@dataclass(frozen=True, kw_only=True, eq=False)
class Response:
    """What an agent says in one turn; the fields are those of `Turn`."""

    text: str
    prompt_ids: np.ndarray
    response_ids: np.ndarray
    logprobs: np.ndarray
    finish_reason: str = "stop"
    weight_version: int = 0
    weight_versions: tuple[tuple[int, int], ...] = ()
    imitate: bool = True


class Actor(Protocol):
    """An agent inside one episode."""

    breaks: int

    async def act(self) -> Response:
        """The next response."""

    def observe(self, response: Response, observation: str) -> None:
        """Take in what the environment answered."""


class Agent(Protocol):
    """Starts an actor for each episode."""

    def start(self, env: TextEnv, observation: str, seed: int) -> Actor:
        """An actor for the episode that `env` has just been reset to. All its randomness comes from `seed`."""


class ModelAgent:
    """A language model behind an engine."""

    def __init__(self, engine: Engine, policy: Policy, *, temperature: float = 1.0, max_response_tokens: int = 512,
                 window: int | None = None):
        """`window`: see `Context`."""
        self.engine, self.temperature, self.window = engine, temperature, window
        self.max_response_tokens = max_response_tokens
        self.template = ChatTemplate(policy.tokenizer, policy.end_ids)

    def start(self, env: TextEnv, observation: str, seed: int) -> "ModelActor":
        return ModelActor(self, env, Context(self.template, env.system_prompt, observation, self.window), seed)


class ModelActor:
    """One episode of a `ModelAgent`."""

    def __init__(self, agent: ModelAgent, env: TextEnv, context: Context, seed: int):
        self._agent, self._stop, self._context, self._seed = agent, env.stop, context, seed
        self._turn = 0

    @property
    def breaks(self) -> int:
        return self._context.breaks

    async def act(self) -> Response:
        prompt_ids = self._context.prompt_ids
        completion = await self._agent.engine.generate(Request(
            prompt_ids=prompt_ids, max_new_tokens=self._agent.max_response_tokens,
            temperature=self._agent.temperature, seed=self._seed + self._turn, stop=self._stop,
            episode=str(self._seed)))
        self._turn += 1
        ids = completion.response_ids
        spoken = ids[:-1] if len(ids) and int(ids[-1]) in self._agent.template.end_ids else ids
        text = self._agent.template.tokenizer.decode(spoken)
        return Response(text=text, prompt_ids=prompt_ids, response_ids=ids, logprobs=completion.logprobs,
                        finish_reason=completion.finish_reason, weight_version=completion.weight_version,
                        weight_versions=completion.weight_versions)

    def observe(self, response: Response, observation: str) -> None:
        self._context.add(response.response_ids, response.text, observation)


class ScriptedAgent:
    """Plays the environment's own gold solution, random responses, or nothing.

    With a policy's tokenizer it also makes the token ids that a model would have read and written, for supervised data.
    """

    def __init__(self, kind: str, policy: Policy | None = None, *, window: int | None = None):
        """`window`: see `Context`."""
        if kind not in ("gold", "random", "noop"):
            raise ValueError(f"no scripted agent {kind!r}; there are gold, random and noop")
        self.kind, self.window = kind, window
        self.template = ChatTemplate(policy.tokenizer, policy.end_ids) if policy else None

    def start(self, env: TextEnv, observation: str, seed: int) -> "ScriptedActor":
        return ScriptedActor(self, env, observation, np.random.default_rng(seed))


class ScriptedActor:
    """One episode of a `ScriptedAgent`."""

    def __init__(self, agent: ScriptedAgent, env: TextEnv, observation: str, rng: np.random.Generator):
        self._env, self._rng, self._kind = env, rng, agent.kind
        self._plan = iter(env.gold(rng)) if agent.kind == "gold" else None
        self._template = agent.template
        self._context = None
        if agent.template:
            self._context = Context(agent.template, env.system_prompt, observation, agent.window)

    @property
    def breaks(self) -> int:
        return self._context.breaks if self._context else 0

    async def act(self) -> Response:
        text = self._text()
        ids = self._template.response_ids(text) if self._template else np.zeros(0, np.int64)
        prompt_ids = self._context.prompt_ids if self._context else np.zeros(0, np.int64)
        return Response(text=text, prompt_ids=prompt_ids, response_ids=ids, logprobs=np.zeros(len(ids), np.float32),
                        imitate=not isinstance(text, Mistake))

    def observe(self, response: Response, observation: str) -> None:
        if self._context:
            self._context.add(response.response_ids, response.text, observation)

    def _text(self) -> str:
        if self._kind == "gold":
            return next(self._plan, "")
        return self._env.random_action(self._rng) if self._kind == "random" else ""
