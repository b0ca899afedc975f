"""The reasoning-gym catalogue: about a hundred generators of puzzles and exercises, each with a verifier.

    gymnasium.make("turngym/ReasoningGym-v0", dataset="chain_sum", config={"max_terms": 3})
    gymnasium.make("turngym/ReasoningGym-v0", dataset=["maze", "sudoku"], config={"sudoku": {"max_empty": 30}})
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from envs.core import LazyTasks, Outcome, SingleTurnEnv, Task
from rewards.pool import TimeLimit, WorkerPool, shared_pool

SPLITS = ("train", "heldout", "test")
WORKER = "envs.reasoning_worker"
SCORE_LIMIT_S = 3.0
MAKE_LIMIT_S = 120.0


class ReasoningGym(SingleTurnEnv):
    """One question, one `<answer>`. Partial credit is the score; only full marks are a success."""

    system_prompt = "Solve the problem. Give the final answer alone, in the form it asks for, inside <answer></answer>."
    action_tags = ("answer",)
    stop = ("</answer>",)
    blocking, worker_share = True, 64  # they wait for a pool of verifiers, which ends what takes too long

    def __init__(self, *, dataset: str | Sequence[str] = "chain_sum", size: int = 1000,
                 config: Mapping[str, Any] | None = None):
        """`dataset`: one name of reasoning-gym's catalogue, or several. `size`: training tasks of each; `heldout` and
        `test` hold an eighth of that. `config`: options of the dataset, or for several {name: options}. Raises
        ValueError for an unknown name or option."""
        super().__init__()
        if not 1 <= size <= 1_000_000:
            raise ValueError(f"size must be between 1 and 1000000, got {size}")
        self.datasets = [dataset] if isinstance(dataset, str) else list(dataset)
        self.configs = {dataset: config or {}} if isinstance(dataset, str) else dict(config or {})
        self.size = size
        self._check()

    def tasks(self, split: str) -> Sequence[Task]:
        if split not in SPLITS:
            raise ValueError(f"ReasoningGym has the splits {', '.join(SPLITS)}, not {split!r}")
        count = len(self.datasets)
        # Neighbouring tasks come from different datasets.
        return LazyTasks(self._split_size(split) * count,
                         lambda index: self._task(self.datasets[index % count], split, index // count))

    def score(self, task: Task, answer: str) -> float:
        try:
            return _pool().call(f"{WORKER}:score", limit_s=SCORE_LIMIT_S, **self._address(task), answer=answer)
        except TimeLimit:
            return 0.0

    def gold(self, rng: np.random.Generator) -> list[str]:
        answer = _pool().call(f"{WORKER}:gold", **self._address(self.task))
        if answer is None:
            raise LookupError(f"reasoning-gym's {self.task.family} gives no answer to its problems")
        return [f"<answer>{answer}</answer>"]

    def random_action(self, rng: np.random.Generator) -> str:
        return f"<answer>{rng.integers(-100, 100)}</answer>"

    def _step(self, action: str) -> Outcome:
        if not action:
            return Outcome(terminated=True, valid=False)
        return super()._step(action)

    def _check(self) -> None:
        names = _pool().call(f"{WORKER}:catalogue")
        unknown = [name for name in self.datasets if name not in names]
        if unknown or not self.datasets:
            raise ValueError(f"no reasoning-gym dataset {', '.join(unknown) or '(none given)'}; there are: "
                             f"{', '.join(names)}")
        if foreign := set(self.configs) - set(self.datasets):
            raise ValueError(f"config names {', '.join(sorted(foreign))}, which is not among the datasets")
        for name in self.datasets:
            refusal = _pool().call(f"{WORKER}:refusal", name=name, size=self.size, config=self._config(name))
            if refusal:
                raise ValueError(f"reasoning-gym's {name} refuses size {self.size} or its config: {refusal}")

    def _split_size(self, split: str) -> int:
        return self.size if split == "train" else max(1, self.size // 8)

    def _config(self, name: str) -> str:
        return json.dumps(self.configs.get(name, {}), sort_keys=True)

    def _task(self, name: str, split: str, index: int) -> Task:
        item = _pool().call(f"{WORKER}:draw", name=name, split=split, size=self._split_size(split),
                            config=self._config(name), index=index)
        if item is None:
            raise ValueError(f"reasoning-gym's {name} has too few different questions for a {split} split of its own; "
                             "widen its config")
        # The index, since a small dataset asks a question twice.
        return Task(key=f"{name}-{split}-{index}-{item['digest'][:20]}", split=split, env_id=self.env_id, family=name,
                    seed=item["seed"], data={"question": item["question"], "index": index})

    def _address(self, task: Task) -> dict[str, Any]:
        """What names the item within reasoning-gym."""
        return {"name": task.family, "seed": task.seed, "size": self._split_size(task.split),
                "config": self._config(task.family), "index": task.data["index"]}


def _pool() -> WorkerPool:
    return shared_pool(WORKER, limit_s=MAKE_LIMIT_S)
