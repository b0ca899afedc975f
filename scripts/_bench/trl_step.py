"""One process of `scripts.bench train`: training steps of TRL's GRPOTrainer, a first one and then `steps` that count.

It runs in a Python of its own, with the extra `trl`. Episodes are played by TRL's `rollout_func`: all that are not over
take a turn together, by one padded `generate` of transformers, which ends with the longest response. Prompts, texts
that end a response, observations and rewards are those of this project's own step.

    {"model", "environment", "options", "tasks", "group_size", "max_response_tokens", "batch", "checkpointing", "steps"}
        ->  {"rows": [{"seconds", "rollout_seconds", "sampled_tokens", "success_rate", "turns"}], "imported", "peak"}
"""

import tempfile
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

import envs
from agents.context import ChatTemplate, Context
from scripts._bench.child import Job, answer, memory


class Clock(TrainerCallback):
    """Times a trainer's steps."""

    def __init__(self, rows: list[dict[str, float]]):
        self._rows, self._began = rows, 0.0

    def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
        self._began = time.perf_counter()

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        self._rows[-1]["seconds"] = time.perf_counter() - self._began


class Player:
    """TRL's `rollout_func` over an environment."""

    def __init__(self, job: Job, rows: list[dict[str, float]]):
        self._job, self._rows = job, rows
        env = self._make_env()
        self.tasks = {str(index): task for index, task in enumerate(env.tasks("train")[:job["tasks"]])}

    def _make_env(self) -> envs.TextEnv:
        return envs.make(self._job["environment"], **self._job["options"])

    def __call__(self, prompts: list[str], trainer: GRPOTrainer) -> dict[str, list]:
        began, tokenizer = time.perf_counter(), trainer.processing_class
        template = ChatTemplate(tokenizer, {tokenizer.eos_token_id})
        episodes = [Episode(self._make_env(), self.tasks[prompt], template) for prompt in prompts]
        settings = GenerationConfig(
            max_new_tokens=self._job["max_response_tokens"], do_sample=True, temperature=1.0, top_k=0, top_p=1.0,
            pad_token_id=tokenizer.pad_token_id, eos_token_id=tokenizer.eos_token_id,
            stop_strings=list(episodes[0].env.stop) or None)
        while running := [episode for episode in episodes if not episode.over]:
            read = tokenizer.pad({"input_ids": [episode.context.prompt_ids.tolist() for episode in running]},
                                 padding_side="left", return_tensors="pt")
            with torch.no_grad():
                written = trainer.model.generate(**read, generation_config=settings, tokenizer=tokenizer)
            for episode, ids in zip(running, written[:, read["input_ids"].shape[1]:].tolist()):
                episode.take(ids, tokenizer, self._job["max_response_tokens"])
        self._rows.append({
            "rollout_seconds": time.perf_counter() - began, "sampled_tokens": sum(sum(e.mask) for e in episodes),
            "turns": sum(e.turns for e in episodes) / len(episodes),
            "success_rate": sum(e.reward > 0 for e in episodes) / len(episodes)})
        return {"prompt_ids": [e.opening for e in episodes], "completion_ids": [e.completion for e in episodes],
                "env_mask": [e.mask for e in episodes], "logprobs": None, "reward": [e.reward for e in episodes]}


class Episode:
    """One episode, as the ids that TRL trains on: what was sampled (mask 1) and what the environment answered (0)."""

    def __init__(self, env: envs.TextEnv, task: envs.Task, template: ChatTemplate):
        self.env, self.over, self.reward, self.turns = env, False, 0.0, 0
        observation, _ = env.reset(options={"task": task})
        self.context = Context(template, env.system_prompt, observation)
        self.opening: list[int] = self.context.prompt_ids.tolist()
        self.completion: list[int] = []
        self.mask: list[int] = []

    def take(self, ids: list[int], tokenizer: Any, limit: int) -> None:
        """Play a response; behind its end stand the batch's filler tokens."""
        end = next((at for at, token in enumerate(ids) if token in (tokenizer.eos_token_id, tokenizer.pad_token_id)),
                   len(ids))
        text = tokenizer.decode(ids[:end])
        stopped = any(stop in text for stop in self.env.stop)
        ids = ids[:end] if stopped else ids[:end + 1]  # behind a stop text even an end token is filler
        observation, reward, terminated, truncated, _ = self.env.step(self.env.parse(text).text)
        self.turns += 1
        self.reward += reward
        self.over = terminated or truncated or (not stopped and end == limit)
        self.completion += ids
        self.mask += [1] * len(ids)
        if not self.over:
            self.context.add(np.array(ids), text, observation)
            answered = self.context.prompt_ids.tolist()[len(self.opening) + len(self.completion):]
            self.completion += answered
            self.mask += [0] * len(answered)


def measure(job: Job, tell: Callable[[Job], None]) -> None:
    imported = memory()["now"]
    rows: list[dict[str, float]] = []
    player = Player(job, rows)
    model = AutoModelForCausalLM.from_pretrained(job["model"], dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(job["model"])
    with tempfile.TemporaryDirectory() as folder:
        trainer = GRPOTrainer(
            model=model, processing_class=tokenizer, rollout_func=player,
            reward_funcs=lambda completions, reward, **columns: reward,
            train_dataset=Dataset.from_dict({"prompt": list(player.tasks)}), callbacks=[Clock(rows)],
            args=GRPOConfig(
                output_dir=folder, use_cpu=True, bf16=False, max_steps=1 + job["steps"],
                num_generations=job["group_size"], per_device_train_batch_size=job["batch"],
                gradient_accumulation_steps=job["tasks"] * job["group_size"] // job["batch"],
                gradient_checkpointing=job["checkpointing"], learning_rate=1e-6, lr_scheduler_type="constant",
                loss_type="grpo", save_strategy="no", report_to="none", disable_tqdm=True, logging_strategy="no"))
        trainer.train()
    tell({"rows": rows[1:], "imported": imported, "peak": memory()["peak"]})


if __name__ == "__main__":
    answer(measure)
