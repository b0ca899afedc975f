"""reasoning-gym in worker processes (`rewards.pool`): its problems and the scores of answers.

Problems are made there because some datasets draw from the order of a set, which the workers' fixed hash seed keeps the
same everywhere, or from the global generators. Answers are scored there because some scorers run for ever on a hostile
text. Others hand it to `eval` or to sympy's `parse_expr`, which evaluates it as Python: those are never called, nor are
a few that call wrong answers right; SAFE_SCORERS stands in for them. tests/envs/test_reasoning.py reads the installed
package for code that evaluates, so that a new one is noticed.
"""

import copy
import functools
import hashlib
import json
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import reasoning_gym
from reasoning_gym.factory import DATASETS

from rewards.countdown import score_countdown
from rewards.formulas import is_antiderivative, same_polynomial

Entry = dict[str, Any]
SPLIT_SEEDS = {"train": 0, "heldout": 1_500_000_000, "test": 3_000_000_000}
DRAW_STRIDE = 1_000_000
"""Distance between the seeds of an item's draws; the items of one draw take up to `size` seeds."""
MAX_DRAWS = 256
JUNK_CREDIT = 0.05
"""Credit up to here is what reasoning-gym gives for any readable text; it counts as nothing."""


def _exact(answer: str, entry: Entry) -> bool:
    return answer == entry["answer"].strip()


def _exact_words(answer: str, entry: Entry) -> bool:
    return answer.replace(" ", "").casefold() == entry["answer"].replace(" ", "").casefold()


def _countdown(answer: str, entry: Entry) -> bool:
    target = entry["metadata"].get("target", 24)
    return score_countdown(entry["metadata"]["numbers"], target, f"<answer>{answer}</answer>") == 1.0


def _antiderivative(answer: str, entry: Entry) -> bool:
    return is_antiderivative(entry["metadata"]["integrand"], entry["metadata"]["variable"], answer)


SAFE_SCORERS: dict[str, Callable[[str, Entry], bool]] = {
    # evaluate the answer as Python
    "binary_matrix": _exact,
    "countdown": _countdown,
    "intermediate_integration": _antiderivative,
    "n_queens": lambda answer, entry: answer in entry["metadata"]["valid_answers"],
    "polynomial_multiplication": lambda answer, entry: same_polynomial(entry["answer"], answer),
    "puzzle24": _countdown,
    "simple_integration": _antiderivative,
    "spiral_matrix": _exact,
    "string_insertion": _exact,
    # give full marks to wrong answers: any non-empty text, ten right letters, right words followed by others
    "figlet_font": _exact_words,
    "game_of_life_halting": _exact,
    "word_sorting": lambda answer, entry: [w.strip() for w in answer.split(",")] == entry["metadata"]["sorted_words"],
}

# Where datasets without an `answer` keep a right one.
GOLD_IN_METADATA: dict[str, Callable[[dict[str, Any]], str]] = {
    "graph_color": lambda metadata: json.dumps(metadata["possible_answer"]),
    "propositional_logic": lambda metadata: metadata["example_answer"],
    "rubiks_cube": lambda metadata: metadata["example_correct_answer"],
}


def catalogue() -> list[str]:
    """Names of the datasets. `composite` is left out: an environment of several datasets does its work."""
    return sorted(set(DATASETS) - {"composite"})


def refusal(name: str, size: int, config: str) -> str:
    """What the dataset has against its size or configuration; "" where nothing."""
    try:
        _dataset(name, SPLIT_SEEDS["train"], size, config)
    except (AssertionError, TypeError, ValueError) as error:
        return str(error) or type(error).__name__
    return ""


def draw(name: str, split: str, size: int, config: str, index: int) -> dict[str, Any] | None:
    """Item `index` of a split: the first of its draws whose question belongs to the split; None without one.

    Questions are divided by their hash, half of them for training, so that no question is ever in two splits. Holds
    `seed` (of the draw), `question` and `digest` (of the question).
    """
    for number in range(MAX_DRAWS):
        seed = SPLIT_SEEDS[split] + number * DRAW_STRIDE
        question = _entry(name, seed, size, config, index)["question"]
        digest = hashlib.sha256(question.encode()).hexdigest()
        if ("heldout", "test", "train", "train")[int(digest, 16) % 4] == split:
            return {"seed": seed, "question": question, "digest": digest}
    return None


def gold(name: str, seed: int, size: int, config: str, index: int) -> str | None:
    """A right answer; None where the dataset knows none."""
    entry = _entry(name, seed, size, config, index)
    if name in GOLD_IN_METADATA:
        return GOLD_IN_METADATA[name](entry["metadata"])
    return None if entry["answer"] is None else str(entry["answer"])


def score(name: str, seed: int, size: int, config: str, index: int, answer: str) -> float:
    """Grade of `answer`, 0 to 1. Whatever a scorer raises on the answer is a 0: the text made it fail."""
    entry = copy.deepcopy(_entry(name, seed, size, config, index))
    try:
        if name in SAFE_SCORERS:
            return float(SAFE_SCORERS[name](answer.strip(), entry))
        credit = float(_dataset(name, seed, size, config).score_answer(answer, entry))
    except Exception:
        return 0.0
    return min(credit, 1.0) if credit > JUNK_CREDIT else 0.0


@functools.lru_cache(maxsize=1024)
def _dataset(name: str, seed: int, size: int, config: str) -> Any:
    """The dataset of that name; `config` is a JSON object of its further options."""
    options = {key: tuple(value) if isinstance(value, list) else value for key, value in json.loads(config).items()}
    _seed_globals(seed)
    return reasoning_gym.create_dataset(name, seed=seed, size=size, **options)


@functools.lru_cache(maxsize=64)
def _entry(name: str, seed: int, size: int, config: str, index: int) -> Entry:
    dataset = _dataset(name, seed, size, config)
    _seed_globals(seed + index)
    return dataset[index]


def _seed_globals(seed: int) -> None:
    """A few datasets draw from Python's or NumPy's global generators; this process is theirs alone."""
    random.seed(seed)
    np.random.seed(seed)
