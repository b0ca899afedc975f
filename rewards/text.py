"""How well a short text answers a question: the SQuAD measures, exact match and token F1."""

import re
import string
import unicodedata
from collections import Counter
from collections.abc import Sequence

from rewards.answers import last_answer_tag
from rewards.tags import hide_thinking

ARTICLES = re.compile(r"\b(?:a|an|the)\b")
TAG = re.compile(r"</?answer>", re.IGNORECASE)


def exact_match(golds: str | Sequence[str], answer: str) -> float:
    """1.0 when the normalised `answer` equals one of the normalised `golds`, else 0.0.

    Normalised: lower case, no punctuation, no articles, single spaces. `answer` is the answer itself or the agent's own
    whole response, of which the last closed `<answer>` outside `<think>` counts; never pass prompt or tool text.
    Raises ValueError without golds.
    """
    prediction = _tokens(_answer_text(answer))
    return float(any(prediction == _tokens(gold) for gold in _as_list(golds)))


def contains_match(golds: str | Sequence[str], answer: str) -> float:
    """1.0 when the words of one of the `golds` stand in a row in `answer`; normalised as in `exact_match`."""
    prediction = f" {' '.join(_tokens(_answer_text(answer)))} "
    return float(any(f" {' '.join(_tokens(gold))} " in prediction for gold in _as_list(golds)))


def f1_score(golds: str | Sequence[str], answer: str) -> float:
    """Best token F1 of `answer` over the `golds`, 0 to 1; normalised as in `exact_match`."""
    prediction = _tokens(_answer_text(answer))
    return max(_f1(_tokens(gold), prediction) for gold in _as_list(golds))


def _f1(gold: list[str], prediction: list[str]) -> float:
    # "yes"/"no" answers share no partial credit with longer texts (the HotpotQA rule).
    if {" ".join(gold), " ".join(prediction)} & {"yes", "no", "noanswer"}:
        return float(gold == prediction)
    common = sum((Counter(gold) & Counter(prediction)).values())
    return 2 * common / (len(gold) + len(prediction)) if common else 0.0


def _tokens(text: str) -> list[str]:
    folded = unicodedata.normalize("NFKC", text).lower()
    kept = "".join(c for c in folded if c not in string.punctuation and not unicodedata.category(c).startswith("P"))
    # A text made of articles alone ("The The", vitamin "A") keeps them, so that it is not equal to the empty answer.
    return ARTICLES.sub(" ", kept).split() or kept.split() or folded.split()


def _answer_text(answer: str) -> str:
    return (last_answer_tag(answer) or "") if TAG.search(answer) else hide_thinking(answer)


def _as_list(golds: str | Sequence[str]) -> list[str]:
    golds = [golds] if isinstance(golds, str) else list(golds)
    if not golds or not all(isinstance(gold, str) and gold.strip() for gold in golds):
        raise ValueError(f"golds must be one or more non-empty texts, got {golds!r}")
    return golds
