r"""Mathematics with a verified answer: generated problems, or any data file with a question and an answer column.

    gymnasium.make("turngym/Math-v0")
    gymnasium.make("turngym/Math-v0", data="gsm8k/train.jsonl")
"""

import functools
import hashlib
import re
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from envs.core import LazyTasks, Outcome, SingleTurnEnv, Task
from envs.math_data import Row, read_splits
from envs.math_problems import Problem, make_problem
from envs.randomness import stable_generator
from rewards import extract_answer, verify_math

TRAIN_SIZE = 1_000_000
PANEL_SIZES = {"heldout": 1_024, "test": 256}


class Math(SingleTurnEnv):
    r"""A problem, one response, the final answer in `\boxed{}`. Reward 1 for an answer that equals the gold, else 0."""

    system_prompt = r"Solve the problem step by step. Put the final answer in \boxed{}."
    blocking, worker_share = True, 64  # they wait for a pool of verifiers, which ends what takes too long

    def __init__(self, *, data: str | None = None, question_column: str | None = None,
                 answer_column: str | None = None):
        """`data`: a JSONL, JSON, CSV or Parquet file, a folder of such files, or a name on the Hugging Face hub; None
        for the generated problems. The columns are found by their usual names unless they are given. See
        docs/mathematics.md. Raises FileNotFoundError and ValueError for data that cannot be used."""
        super().__init__()
        if data is None and (question_column or answer_column):
            raise ValueError("question_column and answer_column belong to a data file: set data as well")
        self._rows = read_splits(data, question_column, answer_column) if data is not None else None

    def tasks(self, split: str) -> Sequence[Task]:
        splits = self._rows if self._rows is not None else ("train", *PANEL_SIZES)
        if split not in splits:
            raise ValueError(f"Math has no split {split!r} here; there are: {', '.join(splits)}")
        if self._rows is not None:
            rows = self._rows[split]
            return LazyTasks(len(rows), lambda index: self._row_task(rows[index], split))
        if split == "train":
            return LazyTasks(TRAIN_SIZE, lambda index: self._problem_task(_train_problem(index), split))
        panel = _panels()[split]
        return LazyTasks(len(panel), lambda index: self._problem_task(panel[index], split))

    def score(self, task: Task, answer: str) -> float:
        return float(verify_math(gold=task.data["answer"], answer=answer))

    def gold(self, rng: np.random.Generator) -> list[str]:
        # A worked solution may hold a mark of its own; the box comes last and counts.
        solution = re.sub(r"\s*####.*", "", self.task.data["solution"])
        return [f"{solution}\nThe answer is $\\boxed{{{self.task.data['answer']}}}$.".lstrip()]

    def random_action(self, rng: np.random.Generator) -> str:
        return rf"\boxed{{{rng.integers(-100, 100)}}}"

    def _step(self, action: str) -> Outcome:
        return replace(super()._step(action), valid=extract_answer(action) is not None)

    def _problem_task(self, problem: Problem, split: str) -> Task:
        return Task(key=_key(problem.question), split=split, env_id=self.env_id, family=problem.family,
                    data={"question": problem.question, "answer": problem.answer, "solution": problem.solution})

    def _row_task(self, row: Row, split: str) -> Task:
        return Task(key=_key(row.question), split=split, env_id=self.env_id, family=row.family,
                    data={"question": row.question, "answer": row.answer, "solution": row.solution})


def _key(question: str) -> str:
    return hashlib.sha256(question.encode()).hexdigest()[:20]


def _draw(name: str) -> Problem:
    return make_problem(stable_generator(name))


@functools.cache
def _panels() -> dict[str, list[Problem]]:
    """The problems of `heldout` and `test`, all different."""
    seen, panels = set(), {}
    for split, size in PANEL_SIZES.items():
        panel, index = [], 0
        while len(panel) < size:
            problem = _draw(f"{split} {index}")
            index += 1
            if problem.question not in seen:
                seen.add(problem.question)
                panel.append(problem)
        panels[split] = panel
    return panels


@functools.cache
def _panel_questions() -> frozenset[str]:
    return frozenset(problem.question for panel in _panels().values() for problem in panel)


def _train_problem(index: int) -> Problem:
    """Item `index` of the training set: the first of its draws that is in neither panel."""
    attempt = 0
    while (problem := _draw(f"train {index} {attempt}")).question in _panel_questions():
        attempt += 1
    return problem
