"""skyrl-gym's environments (`BaseTextEnv`).

    envs.make("turngym/SkyRL-v0", environment="gsm8k", rows="train.jsonl")
    envs.make("turngym/SkyRL-v0", environment="my_env:MyEnv", rows="data/", config={"tool": "sql"})
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from envs.adapters.foreign import ForeignEnv, load_class, read_rows, row_tasks, split_prompt
from envs.core import Outcome, Task

try:
    import skyrl_gym
    from skyrl_gym.envs.base_text_env import BaseTextEnv
    from skyrl_gym.envs.registration import registry
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(f'{error}; pip install "turngym[interop]" installs what skyrl-gym needs',
                              name=error.name) from error


class SkyRL(ForeignEnv):
    """One row, one task: its `prompt` is shown, its other fields are the environment's `extras`. The environment reads
    the whole response."""

    max_turns = 20

    def __init__(self, *, environment: str, rows: str, config: Mapping[str, Any] | None = None,
                 max_turns: int | None = None):
        """`environment`: an id of skyrl-gym's registry, or `module:Class`. `rows`: a JSONL file in SkyRL's form, or a
        folder of them. `config`: its `env_config`. `max_turns`: an upper limit beside the environment's own. Raises
        ValueError for an unknown environment, and what `read_rows` raises."""
        super().__init__(max_turns=max_turns)
        if ":" not in environment and environment not in registry:
            raise ValueError(f"skyrl-gym has no environment {environment!r}; it has {', '.join(sorted(registry))}, and "
                             "one of your own is written module:Class")
        if ":" in environment and not issubclass(load_class(environment), BaseTextEnv):
            raise ValueError(f"{environment} is no skyrl_gym BaseTextEnv")
        self.environment, self.config = environment, dict(config or {})
        self._rows = read_rows(rows)
        self._env: BaseTextEnv | None = None

    def tasks(self, split: str) -> Sequence[Task]:
        return row_tasks(self._rows, split, self.env_id)

    def close(self) -> None:
        if self._env is not None:
            self._env.close()
            self._env = None

    def _reset(self, task: Task, rng: np.random.Generator) -> str:
        self.close()
        extras = {"max_turns": self.max_turns, **task.data}
        prompt = extras.pop("prompt", None)
        split_prompt(prompt, f"row {task.key}")  # before the environment sees it
        made = skyrl_gym.make if ":" not in self.environment else _make
        self._env = made(self.environment, env_config=self.config, extras=extras)
        messages, _ = self._env.init([{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt)
        self.system_prompt, question = split_prompt(messages, f"{self.environment}.init")
        return question

    def _step(self, action: str) -> Outcome:
        if not action.strip():
            return Outcome(observation="The response is empty.", valid=False)
        output = self._env.step(action)
        _, observation = split_prompt(output["observations"], f"{self.environment}.step")
        return self.outcome(observation, output["reward"], terminated=bool(output["done"]),
                            info=output.get("metadata") or {})


def _make(environment: str, **options: Any) -> BaseTextEnv:
    return load_class(environment)(**options)
