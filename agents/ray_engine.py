"""An engine whose replicas are Ray actors, on whatever machines: agents/ray_rollout.py asks it from others.

New weights go to the object store once for each version, and a replica fetches those that a request is for before it
answers, also after it was started again. Requests under way in a replica that is lost are sampled again by another one,
with the same seed.
"""

import asyncio
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import ray
import torch

from agents.crew import LOST, Crew
from agents.engine import Completion, Engine, EngineError, Request

MOST_LOSSES = 5
"""Replicas that one request may lose: it might be what ends them."""


class Weights(NamedTuple):
    """One version of the policy's weights."""

    version: int
    tensors: ray.ObjectRef
    """A mapping of tensors by name, in the object store."""


class EngineReplica:
    """The actor around one engine."""

    def __init__(self, make_engine: Callable[[], Engine]):
        self._engine = make_engine()
        self._version: int | None = None
        self._fetching = asyncio.Lock()

    @ray.method(max_task_retries=-1)
    async def ready(self) -> None:
        """Answers once the engine is there, however often it is started for that."""

    async def generate(self, request: Request, weights: Weights) -> Completion:
        await self.use(weights)
        return await self._engine.generate(request)

    async def score(self, ids: np.ndarray, temperature: float, weights: Weights) -> np.ndarray:
        await self.use(weights)
        return self._engine.score([ids], temperature)[0]

    async def use(self, weights: Weights) -> None:
        """Have these weights. Raises EngineError where it has newer ones."""
        async with self._fetching:
            if self._version == weights.version:
                return
            if self._version is not None and self._version > weights.version:
                raise EngineError(f"asked for weights {weights.version} after {self._version}")
            self._engine.load(await weights.tensors, weights.version)
            self._version = weights.version

    async def forget(self) -> None:
        """Drop what is cached of earlier requests."""
        self._engine.load({}, self._engine.weight_version)

    async def close(self) -> None:
        self._engine.close()


class RayEngine:
    """Engine over `EngineReplica` actors. Pickled, it is another client of theirs, without weights."""

    def __init__(self, replicas: Crew):
        self._replicas = replicas
        self.weights: Weights | None = None
        """What requests are for; `load` makes it, clients elsewhere are given it."""
        self._lost_responses = 0

    def __reduce__(self) -> tuple:
        return RayEngine, (self._replicas,)

    @property
    def weight_version(self) -> int:
        return self.weights.version if self.weights else 0

    @property
    def replica_count(self) -> int:
        """Those that are there; one where all are away, for which requests wait."""
        return max(1, len(self._replicas.present()))

    async def generate(self, request: Request) -> Completion:
        """An episode stays on one replica, which holds its prefix, as long as that is there."""
        weights, place = self.weights, zlib.crc32(request.episode.encode())
        completion = await self._answer(place, "generate", request, weights)
        if completion.weight_version != weights.version:
            raise EngineError(f"an engine replica sampled with weights {completion.weight_version}, asked for "
                              f"{weights.version}")
        return completion

    def load(self, weights: Mapping[str, torch.Tensor], version: int) -> None:
        """Replicas that are away meanwhile fetch the weights when they are back."""
        if weights:
            self.weights = Weights(version, ray.put({name: tensor.detach().cpu() for name, tensor in weights.items()}))
        elif version != self.weight_version:
            raise ValueError(f"no weights of version {version} were given; the replicas hold {self.weight_version}")
        asyncio.run(self._on_all("use", self.weights) if weights else self._on_all("forget"))

    def score(self, sequences: Sequence[np.ndarray], temperature: float = 1.0) -> list[np.ndarray]:
        async def all_of_them() -> list[np.ndarray]:
            return await asyncio.gather(*(self._answer(place, "score", ids, temperature, self.weights)
                                          for place, ids in enumerate(sequences)))
        return asyncio.run(all_of_them())

    def sleep(self) -> None:
        """The replicas have resources of their own."""

    def close(self) -> None:
        self._replicas.close()

    def take_lost_responses(self) -> int:
        """Responses that were sampled again since the last call, because their replica was lost."""
        lost, self._lost_responses = self._lost_responses, 0
        return lost

    async def _answer(self, place: int, method: str, *arguments: Any) -> Any:
        """By the replica at `place`, or another where that is lost."""
        for _ in range(MOST_LOSSES):
            try:
                return await self._replicas.ask(await self._replicas.pick(place), method, *arguments)
            except LOST as error:
                failure = error
                self._lost_responses += method == "generate"
        raise EngineError(f"{MOST_LOSSES} engine replicas were lost over one request, the last one so: {failure}")

    async def _on_all(self, method: str, *arguments: Any) -> None:
        answers = await asyncio.gather(*(self._replicas.ask(replica, method, *arguments)
                                         for replica in self._replicas.present()), return_exceptions=True)
        for error in answers:
            if isinstance(error, BaseException) and not isinstance(error, LOST):
                raise error

