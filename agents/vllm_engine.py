"""vLLM as an engine: one or several replicas, asked by token ids, kept on the learner's weights.

An episode stays on the replica that holds its prefix. A replica that is lost is started again where it is ours, and
gets the current weights before it answers anything; an answer sampled with other weights than those sent is never used.
"""

import asyncio
from collections import Counter, OrderedDict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from agents.background import BackgroundLoop
from agents.engine import Completion, EngineError, Request
from agents.server_client import ServerUnavailable
from agents.vllm_replica import Replica
from agents.weight_transfer import AdapterTransfer, WeightTransfer

MOST_REVIVALS = 3
"""Of one replica between two loads."""
HOMES = 65536
"""Episodes whose replica is remembered."""


class VLLMEngine:
    """Engine over vLLM replicas that serve one model.

    Equal seeds give equal responses as long as the replica computes the same sums: another batch around a request can
    change last bits, and with them, now and then, a token.
    """

    def __init__(self, replicas: Sequence[Replica], end_ids: Sequence[int], *, max_context: int,
                 transfer: WeightTransfer | None = None, shares_gpu: bool = False, keep_cache: bool = True):
        """`replicas` start with the same weights, which are version 0. `end_ids` end a response. `max_context`: prompt
        and response tokens, at most what the replicas read. `transfer`: how `load` brings new weights; None: it
        cannot. `shares_gpu`: `sleep` frees its memory. `keep_cache`: responses under way at `load` go on with the keys
        and values of the older weights, else these are computed anew."""
        if not replicas:
            raise ValueError("an engine needs at least one replica")
        self.replicas, self.max_context, self.transfer = list(replicas), max_context, transfer
        self.shares_gpu, self._keep_cache = shares_gpu, keep_cache
        self.weight_version = 0
        self._end_ids = sorted(end_ids)
        self._sent = False
        """Whether the replicas' weights are ones that `load` sent."""
        self._loads = 0
        """The caches' salt: what was computed before the last load is not read again."""
        self._asleep = False
        self._homes: OrderedDict[str, Replica] = OrderedDict()
        self._revivals: dict[Replica, list[asyncio.Task]] = {}
        """Since the last load."""
        self._renewals: Counter[Replica] = Counter()
        """How often each replica was brought to the weights."""
        self._locks = {replica: asyncio.Lock() for replica in self.replicas}
        """Held while a replica gets weights."""
        self._control = BackgroundLoop()
        """Where replicas are started and get their weights, whoever asks for it."""

    @property
    def replica_count(self) -> int:
        return len(self.replicas)

    def connect(self) -> None:
        """Start the replicas that are ours, and wait until all serve. Raises EngineError."""
        self._control.call(self._on_all(self._start))

    async def generate(self, request: Request) -> Completion:
        if len(request.prompt_ids) == 0:
            raise ValueError("a request needs at least one prompt token")
        if not request.temperature >= 0:
            raise ValueError(f"temperature must be 0 or more, got {request.temperature}")
        room = min(request.max_new_tokens, self.max_context - len(request.prompt_ids))
        if room < 1:
            return Completion(response_ids=np.zeros(0, np.int64), logprobs=np.zeros(0, np.float32),
                              finish_reason="length", weight_version=self.weight_version)
        # All that shapes the distribution is said: a server's defaults may come from the model's generation config.
        sampling = {"temperature": request.temperature, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "logprobs": 0,
                    "seed": request.seed % 2**63, "max_tokens": room, "stop_token_ids": self._end_ids,
                    **({"stop": list(request.stop), "include_stop_str_in_output": True, "skip_special_tokens": False}
                       if request.stop else {})}
        home = self._home(request.episode)
        home.running += 1
        try:
            return await home.retrying(self._sample, home, request.prompt_ids.tolist(), sampling)
        finally:
            home.running -= 1

    def load(self, weights: Mapping[str, torch.Tensor], version: int) -> None:
        """Weights of the version that was loaded last are not sent again. Requests that run are held meanwhile, and go
        on with the new weights behind what they sampled with the old ones. The tensors must stay as they are until the
        next `load`. Raises EngineError where a replica cannot be brought to the new weights."""
        self._loads += 1
        if not weights and version != self.weight_version:
            raise ValueError(f"no weights of version {version} were given; the replicas hold {self.weight_version}")
        if not weights or (self._sent and version == self.weight_version and not self._asleep):
            return
        if self.transfer is None:
            raise ValueError("this engine was made without a way to send weights")
        self.transfer.prepare(weights, version)
        self.weight_version, self._sent = version, True
        self._revivals.clear()
        try:
            self._control.call(self._on_all(self._renew))
        except EngineError as error:
            raise EngineError(f"the weights of version {version} did not reach every replica: {error}") from error
        self._asleep = False

    def score(self, sequences: Sequence[np.ndarray], temperature: float = 1.0) -> list[np.ndarray]:
        """Raises ValueError for a temperature other than 1, which vLLM does not apply to given tokens."""
        if temperature != 1.0:
            raise ValueError(f"vLLM scores at temperature 1 only, got {temperature}")

        async def all_of_them() -> list[np.ndarray]:
            return await asyncio.gather(*(self.replicas[i % len(self.replicas)].score(ids.tolist())
                                          for i, ids in enumerate(sequences)))
        return self._control.call(all_of_them())

    def sleep(self) -> None:
        """Frees GPU memory where vLLM runs in this process; servers have GPUs of their own, and stay awake."""
        if not self.shares_gpu:
            return
        level = 1 if isinstance(self.transfer, AdapterTransfer) else 2
        self._asleep = True
        self._control.call(self._on_all(lambda replica: replica.sleep(level)))

    def close(self) -> None:
        """End what is ours."""
        self._control.close()
        for replica in self.replicas:
            replica.close()
        if self.transfer is not None:
            self.transfer.close()

    def _home(self, episode: str) -> Replica:
        """The replica that holds the episode's prefix; for a new one that with the fewest requests."""
        home = self._homes.pop(episode, None) or min(self.replicas, key=lambda replica: replica.running)
        if episode:
            self._homes[episode] = home
            if len(self._homes) > HOMES:
                self._homes.popitem(last=False)
        return home

    async def _sample(self, replica: Replica, prompt_ids: list[int], sampling: dict[str, Any]) -> Completion:
        """One try."""
        if not replica.current or not replica.alive:
            await self._control.wait(self._revive(replica))
        oldest, renewals = self.weight_version, self._renewals[replica]
        try:
            sample = await replica.generate(prompt_ids, sampling, str(self._loads))
        except ServerUnavailable as error:
            if not error.connected:
                self._lose(replica, renewals)
            raise
        if sample.finish_reason not in ("stop", "length"):
            raise ServerUnavailable(f"{replica.name} ended a response by {sample.finish_reason!r}")
        known = {str(version): version for version in range(oldest, self.weight_version + 1)}
        if strange := [version for version, _ in sample.versions if version not in known]:
            self._lose(replica, renewals)
            raise ServerUnavailable(f"{replica.name} sampled with weights {strange[0]!r}, which are not those that it "
                                    f"was sent ({self.weight_version}): was it restarted, or does it serve two runs?")
        versions = tuple((known[version], end) for version, end in sample.versions)
        return Completion(response_ids=np.array(sample.token_ids, np.int64),
                          logprobs=np.array(sample.logprobs, np.float32), finish_reason=sample.finish_reason,
                          weight_version=versions[0][0] if versions else oldest,
                          weight_versions=versions if len(versions) > 1 else ())

    def _lose(self, replica: Replica, renewals: int) -> None:
        """The replica is not what it should be, unless it was renewed since a request began."""
        if self._renewals[replica] == renewals:
            replica.current = False

    async def _on_all(self, action: Callable[[Replica], Awaitable[None]]) -> None:
        await asyncio.gather(*map(action, self.replicas))

    async def _start(self, replica: Replica) -> None:
        self.max_context = min(self.max_context, await replica.start())
        await self._bring_weights(replica)

    async def _revive(self, replica: Replica) -> None:
        """All that wait for the replica wait for one revival."""
        tasks = self._revivals.setdefault(replica, [])
        if not tasks or tasks[-1].done():
            if len(tasks) == MOST_REVIVALS:
                raise EngineError(f"{replica.name} was lost {MOST_REVIVALS} times since it last got new weights. "
                                  f"{replica.last_words}")
            tasks.append(asyncio.create_task(self._renew(replica)))
        await asyncio.shield(tasks[-1])

    async def _renew(self, replica: Replica) -> None:
        """Bring the weights to a replica, which is started anew where it was lost or, if ours, does not take them."""
        async with self._locks[replica]:
            if replica.alive and replica.current:
                try:
                    return await self._bring_weights(replica)
                except EngineError:  # half of it may be done
                    if not replica.ours:
                        raise
            if self.transfer is not None:
                self.transfer.forget(replica)
            await replica.start()
            await self._bring_weights(replica)

    async def _bring_weights(self, replica: Replica) -> None:
        if self._sent:
            await replica.pause(self._keep_cache)
            if self._asleep:
                await replica.wake("weights")
            await self.transfer.send(replica)
            if self._asleep:
                await replica.wake("kv_cache")
        await replica.set_version(str(self.weight_version))
        if self._sent:
            await replica.resume()
        if (version := await replica.version()) != str(self.weight_version):
            raise EngineError(f"{replica.name} holds weights {version!r} after version {self.weight_version} was sent")
        replica.current = True
        self._renewals[replica] += 1
