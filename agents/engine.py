"""What an engine is: token ids in, token ids and their log-probabilities out."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch


class EngineError(RuntimeError):
    """An engine gave no answer that can be used; the message says what it said and what to do."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Request:
    """One response to sample."""

    prompt_ids: np.ndarray
    """What the model reads. # int64 [prompt_length]"""
    max_new_tokens: int
    temperature: float = 1.0
    """0 is greedy; log-probabilities are then those at temperature 1."""
    seed: int = 0
    """Two requests with equal prompts and seeds get equal responses, whatever is generated beside them."""
    stop: tuple[str, ...] = ()
    """Texts at which generation ends; they stay in the response."""
    episode: str = ""
    """Requests of one episode share a prefix that an engine may keep."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Completion:
    """What an engine sampled for a request."""

    response_ids: np.ndarray
    """End token included where one was sampled. # int64 [response_length]"""
    logprobs: np.ndarray
    """Log-probabilities of the sampled ids under the distribution that they were drawn from.
    # float32 [response_length]"""
    finish_reason: str
    """`stop` or `length`."""
    weight_version: int
    """Of the weights that sampled it; where they changed in the middle, of the first tokens."""
    weight_versions: tuple[tuple[int, int], ...] = ()
    """Where they changed in the middle: the version of each span of tokens and the index that it ends before."""


class Engine(Protocol):
    """Generates for many episodes at once. `generate` may be awaited by any number of episodes together."""

    weight_version: int
    replica_count: int
    """Copies of the model that answer."""

    async def generate(self, request: Request) -> Completion:
        """Sample one response. A prompt that leaves no room gives an empty response with reason `length`."""

    def load(self, weights: Mapping[str, torch.Tensor], version: int) -> None:
        """Use these weights from the next token on. Responses under way go on; of what else is cached under older
        weights nothing is used. Call it in the thread whose event loop runs the requests, if there are any."""

    def score(self, sequences: Sequence[np.ndarray], temperature: float = 1.0) -> list[np.ndarray]:
        """Log-probability of each id of each sequence given those before it; the first is 0. # float32 [length] each

        Sequence i is scored by replica i, modulo their number.
        """

    def sleep(self) -> None:
        """No request comes before the next `load`: others may use the engine's memory until then."""

    def close(self) -> None:
        """End what the engine started."""
