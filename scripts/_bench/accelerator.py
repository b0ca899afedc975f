"""One process of `scripts.gpu_check`: one of its checks, on one device. It answers rows of

    {"what", "value", "unit", "limit": the largest that holds, or null}
"""

import asyncio
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedConfig, Qwen2Config, Qwen2ForCausalLM

from agents.engine import Request
from agents.models import Policy, prepare
from agents.scoring import head_logits, score_sequences, token_logprobs
from agents.tiny import train_tokenizer
from agents.trajectory import Group, Trajectory, Turn
from agents.transformers_engine import TransformersEngine
from envs.core import Task
from scripts._bench.child import ROOT, Job, answer, memory
from scripts._display import SilentDisplay
from trainers.algorithms.grpo import GRPO
from trainers.batch import Batch, pack
from trainers.config import build_config
from trainers.learner import Learner, OptimizerSettings
from trainers.loop import train
from trainers.plan import plan
from trainers.run import Run
from trainers.settings import merge, read_toml

Tell = Callable[..., None]
GIB = 2**30
FLOAT32_LIMIT, BFLOAT16_LIMIT = 1e-4, 5e-2
"""Of a mean difference between log-probabilities on the CPU in float32 and on the device."""
SMALL, HALF, LARGER = "small", "0.5B", "1.5B"
QWEN = {HALF: {"hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24, "num_attention_heads": 14},
        LARGER: {"hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28, "num_attention_heads": 12},
        SMALL: {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}}
"""Shapes of Qwen2.5's models (arXiv 2412.15115), and of one for a CPU."""
VOCABULARY, SMALL_VOCABULARY = 151_936, 1024


def random_model(size: str, device: str, dtype: torch.dtype) -> Policy:
    """A Qwen2 with random weights, made on the device; the same ones for the same device. Its tokenizer is never used.
    """
    shape = QWEN[size]
    config = Qwen2Config(**shape, num_key_value_heads=2, tie_word_embeddings=True, max_position_embeddings=4096,
                         vocab_size=SMALL_VOCABULARY if size == SMALL else VOCABULARY,
                         initializer_range=shape["hidden_size"]**-0.5, eos_token_id=None, bos_token_id=None)
    torch.manual_seed(0)
    with torch.device(device):
        model = Qwen2ForCausalLM(config)
    return Policy(prepare(model.to(dtype)), train_tokenizer(["Numbers: 1 2 3."], 300))


def check_equality(device: str, small: bool, tell: Tell) -> None:
    """Log-probabilities, samples and gradients of a small model against the CPU's in float32."""
    rng = np.random.default_rng(0)
    sequences = [rng.integers(5, SMALL_VOCABULARY, length) for length in (200, 150, 30, 7)]
    prompts = random_prompts(1, 16, 24, SMALL_VOCABULARY)
    reference = random_model(SMALL, "cpu", torch.float32)
    truth = np.concatenate(score_sequences(reference.model, sequences))
    batch = random_batch(rng, episodes=8, prompt=32, response=32, vocabulary=SMALL_VOCABULARY)
    gradient = gradient_of(reference, batch)
    said = sampled(TransformersEngine(reference), prompts, 32)
    for dtype, limit in ((torch.float32, FLOAT32_LIMIT), (torch.bfloat16, BFLOAT16_LIMIT)):
        name, policy = str(dtype).removeprefix("torch."), random_model(SMALL, "cpu", dtype)
        policy.model.to(device)
        found = np.concatenate(score_sequences(policy.model, sequences))
        tell(f"{name}: log-probabilities, mean difference", float(np.abs(found - truth).mean()), "nats", limit)
        other = gradient_of(policy, batch)
        tell(f"{name}: gradient, relative difference", float((other - gradient).norm() / gradient.norm()), "",
             1e-3 if dtype == torch.float32 else 0.2)
        mine = sampled(TransformersEngine(policy), prompts, 32)
        differing = sum(not np.array_equal(a.response_ids, b.response_ids) for a, b in zip(said, mine))
        tell(f"{name}: of 16 sampled responses, differing", differing, "", 1 if dtype == torch.float32 else None)
        scored = score_sequences(policy.model, [np.concatenate([prompt, one.response_ids])
                                                for prompt, one in zip(prompts, mine)])
        gap = np.mean([np.abs(one.logprobs - numbers[24:]).mean() for one, numbers in zip(mine, scored)])
        tell(f"{name}: engine against learner, mean difference", float(gap), "nats", limit)


def check_logprobs(device: str, small: bool, tell: Tell) -> None:
    """The chunked log-probabilities against full logits: difference, seconds and memory of forward and backward."""
    tokens = 256 if small else 8192
    policy = large_model(HALF, device, small)
    model, vocabulary = policy.model, policy.model.config.vocab_size
    hidden = torch.randn(tokens, model.config.hidden_size, device=device, dtype=model.dtype)
    targets = torch.randint(vocabulary, (tokens,), device=device)

    def full(states: torch.Tensor) -> torch.Tensor:
        return head_logits(model, states).log_softmax(-1).gather(-1, targets[:, None])[:, 0]

    def chunked(states: torch.Tensor) -> torch.Tensor:
        return token_logprobs(model, states, targets, 1.0)[0]

    found = {}
    for name, function in (("chunked", chunked), ("full", full)):
        states = hidden.clone().requires_grad_()
        function(states).sum().backward()  # the first call prepares kernels and the head's gradient
        states.grad, before = None, start_peak(device)
        began = time.perf_counter()
        logprobs = function(states)
        logprobs.sum().backward()
        synchronise(device)
        tell(f"{name}: forward and backward of {tokens} tokens", time.perf_counter() - began, "s")
        tell(f"{name}: peak memory beyond what was there", (peak(device) - before) / GIB, "GiB")
        found[name] = logprobs.detach(), states.grad.float()
    limit = FLOAT32_LIMIT if small else BFLOAT16_LIMIT
    (mine, gradient), (other, full_gradient) = found["chunked"], found["full"]
    tell("log-probabilities, largest difference", float((mine - other).abs().max()), "nats", limit)
    tell("gradient, relative difference", float((gradient - full_gradient).norm() / full_gradient.norm()), "", limit)


def check_speed(size: str, device: str, small: bool, tell: Tell) -> None:
    """Tokens a second of sampling, scoring and training, and peak memory beside the plan's estimate."""
    episodes, prompt, response = (4, 16, 8) if small else (256, 256, 128)
    policy = large_model(size, device, small)
    vocabulary, tokens = policy.model.config.vocab_size, episodes * (prompt + response)
    before = 0 if device.startswith("cuda") else memory()["now"]
    tell("parameters", sum(p.numel() for p in policy.model.parameters()) / 1e6, "M")
    engine = TransformersEngine(policy, slots=episodes, max_context=prompt + response)
    sampled(engine, random_prompts(0, episodes, prompt, vocabulary), 2)
    began = time.perf_counter()
    sampled(engine, random_prompts(1, episodes, prompt, vocabulary), response)
    tell(f"rollout: {episodes} responses of {response} tokens, prompts of {prompt}",
         episodes * response / (time.perf_counter() - began), "tokens/s")
    batch = random_batch(np.random.default_rng(0), episodes, prompt, response, vocabulary)
    settings = OptimizerSettings(row_tokens=prompt + response)
    score_sequences(policy.model, batch.sequences()[:2])
    began = time.perf_counter()
    score_sequences(policy.model, batch.sequences())
    tell(f"scoring: {tokens:,} tokens", tokens / (time.perf_counter() - began), "tokens/s")
    learner = Learner(policy, GRPO(), settings)
    learner.update(batch, np.random.default_rng(0))
    began = time.perf_counter()
    learner.update(batch, np.random.default_rng(0))
    tell(f"update: {tokens:,} tokens", tokens / (time.perf_counter() - began), "tokens/s")
    tell("peak memory", (peak(device) - before) / GIB, "GiB")
    tell("peak memory over the plan's estimate", (peak(device) - before) / GIB / estimate(
        policy.model.config, episodes, prompt + response, policy.model.dtype), "", None if small else 1.0)


def estimate(model: PreTrainedConfig, episodes: int, context: int, dtype: torch.dtype) -> float:
    """What the plan of a run with this model says it needs. # GiB"""
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        rows = dict(plan(build_config({
            "model": {"path": folder, "dtype": str(dtype).removeprefix("torch.")},
            "rollout": {"concurrency": episodes, "max_context_tokens": context}})))
    return float(rows["memory in all, at most"].split()[0])


def check_training(seconds: float, device: str, small: bool, tell: Tell) -> None:
    """Countdown as `make train` trains it, after a shorter warm start, for so many seconds."""
    changes: dict[str, Any] = {"evaluation": {"episodes": 0}, "model": {"device": device}, "warm_start": {"steps": 400}}
    if small:
        changes = merge(changes, {"warm_start": {"steps": 2, "demonstrations": 16}, "run": {"steps": 2},
                                  "rollout": {"tasks_per_step": 2}, "algorithm": {"name": "GRPO"},
                                  "model": {"hidden_size": 32, "layers": 1}})
    config = build_config(merge(read_toml(ROOT / "configs" / "countdown_tiny.toml"), changes))
    clock = Clock(seconds)
    with tempfile.TemporaryDirectory() as folder:
        try:
            train(Run.create(Path(folder) / "run", config), clock)
        except KeyboardInterrupt:
            tell("stopped as planned after", time.perf_counter() - clock.began, "s")
    trained = [row for row in clock.rows if "success_rate" in row]
    part = max(1, min(5, len(trained) // 2))
    tell("steps", len(trained), "")
    for name, some in (("first", trained[:part]), ("last", trained[-part:])):
        tell(f"success in the {name} {part} steps", float(np.mean([row["success_rate"] for row in some])), "")
    for name in ("rollout_seconds", "score_seconds", "credit_seconds", "update_seconds"):
        tell(f"{name.removesuffix('_seconds')}, median", float(np.median([row[name] for row in trained])), "s")
    tell("rollout", float(np.median([row["tokens_per_second"] for row in trained])), "tokens/s")
    tell("engine against learner at the first step", trained[0]["logprob_gap"], "nats", FLOAT32_LIMIT)


class Clock(SilentDisplay):
    """A training run's display that ends it when its time is up."""

    def __init__(self, seconds: float):
        self.rows: list[dict[str, float]] = []
        self.began, self._seconds = time.perf_counter(), seconds

    def advance(self, metrics: dict[str, float]) -> None:
        self.rows.append(metrics)
        if "success_rate" in metrics and time.perf_counter() - self.began > self._seconds:
            raise KeyboardInterrupt


def large_model(size: str, device: str, small: bool) -> Policy:
    """In bfloat16; for the small form a small one in float32."""
    return random_model(SMALL, device, torch.float32) if small else random_model(size, device, torch.bfloat16)


def random_prompts(seed: int, count: int, length: int, vocabulary: int) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    return [rng.integers(5, vocabulary, length) for _ in range(count)]


def sampled(engine: TransformersEngine, prompts: list[np.ndarray], tokens: int) -> list:
    """The engine's completions of all prompts at once."""
    async def all_of_them() -> list:
        return await asyncio.gather(*(engine.generate(Request(prompt_ids=prompt, max_new_tokens=tokens, seed=index))
                                      for index, prompt in enumerate(prompts)))
    return asyncio.run(all_of_them())


def random_batch(rng: np.random.Generator, episodes: int, prompt: int, response: int, vocabulary: int) -> Batch:
    """Episodes of one turn with random tokens, in groups of two: a failure and a success."""
    def episode(task: Task, success: bool) -> Trajectory:
        turn = Turn(prompt_ids=rng.integers(5, vocabulary, prompt), response_ids=rng.integers(5, vocabulary, response),
                    logprobs=np.full(response, -np.log(vocabulary), np.float32), reward=float(success))
        return Trajectory(task=task, turns=[turn], reward=float(success), success=success, score=float(success))

    tasks = [Task(key=str(index)) for index in range(episodes // 2)]
    groups = [Group(task=task, trajectories=[episode(task, False), episode(task, True)]) for task in tasks]
    return pack(groups, GRPO().advantages(groups))


def gradient_of(policy: Policy, batch: Batch) -> torch.Tensor:
    """Of GRPO's loss, on the CPU in float32."""
    learner = Learner(policy, GRPO(), OptimizerSettings())
    policy.model.zero_grad()
    learner.accumulate_gradients(batch)
    return torch.cat([p.grad.float().flatten().cpu() for p in learner.parameters])


def synchronise(device: str) -> None:
    if device.startswith("cuda"):
        torch.cuda.synchronize()


def start_peak(device: str) -> int:
    """Bytes in use as a new measurement of the peak begins (on a CPU the peak is the process's, and never falls)."""
    if not device.startswith("cuda"):
        return memory()["now"]
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    return torch.cuda.memory_allocated()


def peak(device: str) -> int:
    return torch.cuda.max_memory_allocated() if device.startswith("cuda") else memory()["peak"]


def work(job: Job, send: Callable[[Job], None]) -> None:
    def tell(what: str, value: float, unit: str, limit: float | None = None) -> None:
        send({"what": what, "value": value, "unit": unit, "limit": limit})

    check = {"equality": check_equality, "log-probabilities": check_logprobs,
             "speed 0.5B": partial(check_speed, HALF), "speed 1.5B": partial(check_speed, LARGER),
             "training": partial(check_training, job["seconds"])}[job["check"]]
    check(job["device"], job["small"], tell)


if __name__ == "__main__":
    answer(work)
