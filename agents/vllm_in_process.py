"""vLLM inside this process, for a GPU that learner and engine share in turns: it sleeps while the learner works."""

import itertools
import os
import sys
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar

import numpy as np

from agents.background import BackgroundLoop
from agents.engine import EngineError
from agents.vllm_replica import ADAPTER_NAME, Sample
from agents.vllm_server import PLUGIN

T = TypeVar("T")


class InProcessReplica:
    """One `vllm.AsyncLLM`. It lives in a loop of its own, since those that ask for responses come and go."""

    name = "vLLM in this process"
    ours = True
    last_words = ""

    def __init__(self, arguments: Sequence[str]):
        """`arguments`: those of `vllm serve` that concern the engine. Raises EngineError where there is no vLLM."""
        os.environ["PYTHONPATH"] = os.pathsep.join(
            dict.fromkeys([str(PLUGIN), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]))  # for its processes
        if str(PLUGIN) not in sys.path:
            sys.path.append(str(PLUGIN))
        try:
            import vllm
        except ImportError as error:
            raise EngineError(f"this interpreter has no vLLM ({error}): install the extra `vllm`, or use servers"
                              ) from error
        self._vllm, self._arguments = vllm, list(arguments)
        self.running, self.current = 0, True
        self._llm: Any = None
        self._adapter: Any = None
        self._numbers = itertools.count()
        self._loop = BackgroundLoop()

    @property
    def alive(self) -> bool:
        return self._llm is not None and not self._llm.errored

    async def start(self) -> int:
        await self.end()
        self._llm = await self._do(self._start())
        return int(self._llm.model_config.max_model_len)

    async def end(self) -> None:
        if self._llm is not None:
            self._llm.shutdown()
        self._llm = self._adapter = None

    async def retrying(self, ask: Callable[..., Awaitable[T]], *arguments: Any) -> T:
        return await ask(*arguments)

    async def generate(self, prompt_ids: list[int], sampling: dict[str, Any], salt: str) -> Sample:
        output = (await self._do(self._sample(prompt_ids, sampling, salt))).outputs[0]
        return Sample(list(output.token_ids), [at[i].logprob for i, at in zip(output.token_ids, output.logprobs)],
                      output.finish_reason, [(span.version, span.end) for span in output.weight_versions or []])

    async def score(self, ids: list[int]) -> np.ndarray:
        sampling = {"temperature": 0.0, "max_tokens": 1, "prompt_logprobs": 0}
        found = (await self._do(self._sample(ids, sampling, "score"))).prompt_logprobs
        return np.array([0.0, *(at[i].logprob for i, at in zip(ids[1:], found[1:]))], np.float32)

    async def pause(self, keep_cache: bool) -> None:
        await self._do(self._llm.pause_generation(mode="keep", clear_cache=not keep_cache))

    async def resume(self) -> None:
        await self._do(self._llm.resume_generation())

    async def update(self, info: dict[str, Any]) -> None:
        from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest

        await self._do(self._llm.start_weight_update())
        await self._do(self._llm.update_weights(WeightTransferUpdateRequest(update_info=info)))
        await self._do(self._llm.finish_weight_update())

    async def load_adapter(self, folder: str) -> None:
        from vllm.lora.request import LoRARequest

        self._adapter = LoRARequest(ADAPTER_NAME, 1, folder)
        await self._do(self._llm.add_lora(LoRARequest(ADAPTER_NAME, 1, folder, load_inplace=True)))

    async def version(self) -> str:
        return await self._do(self._llm.get_weight_version())

    async def set_version(self, version: str) -> None:
        await self._do(self._llm.update_weight_version(version))

    async def sleep(self, level: int) -> None:
        await self._do(self._llm.sleep(level))

    async def wake(self, tag: str) -> None:
        await self._do(self._llm.wake_up([tag]))

    def close(self) -> None:
        self._loop.call(self.end())
        self._loop.close()

    async def _do(self, work: Awaitable[T]) -> T:
        """What `work` gives in the engine's loop; whatever it raises as an EngineError."""
        async def guarded() -> T:
            try:
                return await work
            except Exception as error:
                raise EngineError(f"{self.name} failed: {type(error).__name__}: {error}") from error
        return await self._loop.wait(guarded())

    async def _start(self) -> Any:
        from vllm.utils.argparse_utils import FlexibleArgumentParser

        parser = self._vllm.AsyncEngineArgs.add_cli_args(FlexibleArgumentParser())
        read = parser.parse_args(self._arguments)
        return self._vllm.AsyncLLMEngine.from_engine_args(self._vllm.AsyncEngineArgs.from_cli_args(read))

    async def _sample(self, prompt_ids: list[int], sampling: dict[str, Any], salt: str) -> Any:
        from vllm.sampling_params import RequestOutputKind

        parameters = self._vllm.SamplingParams(**sampling, output_kind=RequestOutputKind.FINAL_ONLY)
        prompt = self._vllm.TokensPrompt(prompt_token_ids=prompt_ids, cache_salt=salt)
        request = self._llm.generate(prompt, parameters, str(next(self._numbers)), lora_request=self._adapter)
        return [output async for output in request][-1]
