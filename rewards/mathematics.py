"""Is a mathematical answer right? Exact arithmetic where that decides it, else math-verify in a worker process."""

import re
from collections.abc import Sequence

from rewards.answers import extract_answer
from rewards.equivalence import same_answer
from rewards.pool import shared_pool
from rewards.tags import hide_thinking

MARKED = re.compile(r"\\f?box(?:ed)?\s*\{|</?answer>|^[ \t]*####", re.MULTILINE | re.IGNORECASE)


class _Undecided(Exception):
    """The comparison needs symbolic mathematics."""


def verify_math(*, gold: str, answer: str) -> bool:
    r"""Whether `answer` has the value of `gold`.

    `answer` is a whole completion (see `extract_answer` for where its answer is looked for) or the answer alone. `gold`
    is an answer, or a worked solution that ends in `\boxed{...}` or `#### ...`. Whatever the model wrote gives True or
    False, never an exception: a text that takes longer than a second of CPU time to compare is wrong. Works from any
    thread and process. Raises ValueError for an unusable gold and PoolError when the worker processes fail.
    """
    return verify_math_batch(golds=[gold], answers=[answer])[0]


def verify_math_batch(*, golds: Sequence[str], answers: Sequence[str]) -> list[bool]:
    """`verify_math` for every pair, in order: as many results as pairs. Raises ValueError for unequal lengths."""
    if isinstance(golds, str) or isinstance(answers, str) or len(golds) != len(answers):
        raise ValueError(f"golds and answers must be two lists of one length, got {len(golds)} and {len(answers)}")
    pairs = [{"gold": gold_answer(gold), "answer": _answer_text(answer)} for gold, answer in zip(golds, answers)]
    verdicts = [_decide(**pair) for pair in pairs]
    undecided = [index for index, verdict in enumerate(verdicts) if verdict is None]
    if undecided:
        results = shared_pool("rewards.symbolic").map("rewards.symbolic:equal", [pairs[index] for index in undecided])
        for index, result in zip(undecided, results):
            verdicts[index] = result is True
    return verdicts


def _decide(gold: str, answer: str | None) -> bool | None:
    """The verdict where exact arithmetic and text suffice, else None."""
    if answer is None:
        return False
    try:
        return same_answer(gold, answer, _undecided)
    except _Undecided:
        return None


def _undecided(gold: str, answer: str) -> bool:
    raise _Undecided


def gold_answer(gold: str) -> str:
    """The bare answer of a gold: the text itself, or what a worked solution marks. Raises ValueError without one."""
    if not isinstance(gold, str) or not gold.strip():
        raise ValueError(f"gold must be a text with an answer, got {gold!r}")
    if not MARKED.search(gold):
        return gold.strip()
    extracted = extract_answer(gold)
    if extracted is None:
        raise ValueError(f"gold has an empty, unclosed or doubtful answer: ...{gold[-200:]!r}")
    return extracted


def _answer_text(answer: str) -> str | None:
    """The answer in a completion; a text without any mark is the answer itself."""
    if not isinstance(answer, str):
        raise TypeError(f"answer must be text, got {type(answer).__name__}")
    extracted = extract_answer(answer)
    if extracted is None and not MARKED.search(answer):
        return hide_thinking(answer).strip() or None
    return extracted
