"""Whether two answers are the same: numbers exactly, collections item by item, the rest by a given judge."""

import re
from collections.abc import Callable

from rewards.exact import NotRational, Quantity, Unusable, read_quantity, same_quantity
from rewards.notation import normalise, split_unit

Judge = Callable[[str, str], bool]
"""Decides (gold, answer) for two expressions that are neither both numbers nor both collections."""

MAX_LENGTH = 2_000
"""Characters of a gold or an answer beyond which only the very same text is equal."""
NAME = r"(?:[a-zA-Z][a-zA-Z0-9_{}' ]*|\\[a-zA-Z]+(?:_(?:\w+|\{\w+\}))?)(?:\([a-zA-Z](?:,\s*[a-zA-Z])*\))?"
ASSIGNMENT = re.compile(rf"({NAME})\s*(?:=|\\in(?![a-zA-Z]))(.+)", re.DOTALL)
APPROXIMATELY = re.compile(r"\\approx(?![a-zA-Z])")
TIME = re.compile(r"\d+:\d+(?::\d+)?")
WORDS = re.compile(r"[a-zA-Z][a-zA-Z']{3,}|[a-zA-Z']+(?: [a-zA-Z']+)+")
UNORDERED = ("", r"\{\}")
BRACKETS = {"(": 1, "[": 1, "{": 1, ")": -1, "]": -1, "}": -1}


def same_answer(gold: str, answer: str, judge: Judge) -> bool:
    """Equal mathematical content. `judge` is asked for what is neither rational arithmetic nor a collection of it."""
    if max(len(gold), len(answer)) > MAX_LENGTH:
        return gold.strip() == answer.strip()
    return _same(normalise(gold), normalise(answer), judge)


def _same(gold: str, answer: str, judge: Judge) -> bool:
    if gold == answer:
        return True
    if not answer:
        return False
    gold, answer = _without_names(_exact_part(gold), _exact_part(answer))
    if gold == answer:
        return True
    gold_number, gold_unit = _quantity(gold)
    answer_number, answer_unit = _quantity(answer)
    if isinstance(gold_number, Unusable) or isinstance(answer_number, Unusable):
        return False
    if gold_number and answer_number:
        units = {gold_unit, answer_unit} - {"", "?"}
        return len(units) < 2 and same_quantity(gold_number, answer_number)
    gold_items, answer_items = _collection(gold), _collection(answer)
    if gold_number and answer_items and answer_items[0] not in UNORDERED:
        return False  # 12,345 is a number, (12,345) is none
    if gold_items and answer_items:
        return _same_collection(gold_items, answer_items, judge)
    if (gold_items and answer_number) or (gold_number and answer_items):
        items, single = (gold_items, answer) if gold_items else (answer_items, gold)
        # A set of one is its element; any longer collection is not a number.
        return items[0] == r"\{\}" and len(items[1]) == 1 and _same(*(
            (items[1][0], single) if gold_items else (single, items[1][0])), judge)
    if TIME.fullmatch(gold) or TIME.fullmatch(answer):
        return False
    if WORDS.fullmatch(gold) or WORDS.fullmatch(answer):
        return gold.casefold() == answer.casefold()
    return judge(gold, answer)


def _quantity(text: str) -> tuple[Quantity | Unusable | None, str]:
    """The number and its unit; None where the text is no rational arithmetic."""
    number, unit = split_unit(text)
    try:
        return read_quantity(number), unit
    except Unusable as error:
        return error, unit
    except NotRational:
        return None, ""


def _exact_part(text: str) -> str:
    r"""`\frac13\approx 0.33` is `\frac13`; `x\approx 0.33` is `x=0.33`."""
    left, *rest = APPROXIMATELY.split(text)
    if not rest:
        return text
    return f"{left}={rest[0]}" if re.fullmatch(NAME, left) else left


def _without_names(gold: str, answer: str) -> tuple[str, str]:
    """Both texts without the assigned name (`x=5` -> `5`), where the other side leaves it out or has the same."""
    gold_match, answer_match = ASSIGNMENT.fullmatch(gold), ASSIGNMENT.fullmatch(answer)
    if gold_match and answer_match:
        if gold_match.group(1) == answer_match.group(1):
            return _last_of_chain(gold_match.group(2)), _last_of_chain(answer_match.group(2))
    elif gold_match and "=" not in answer:
        return _last_of_chain(gold_match.group(2)), answer
    elif answer_match and "=" not in gold:
        return gold, _last_of_chain(answer_match.group(2))
    elif "=" not in gold:
        return gold, _last_of_chain(answer)
    return gold, answer


def _last_of_chain(text: str) -> str:
    """The right-hand side of a true chain of numbers (`2+3=5` -> `5`); any other text as it is."""
    if "=" not in text:
        return text
    numbers = [_quantity(part)[0] for part in text.split("=")]
    if all(isinstance(n, Quantity) for n in numbers) and all(same_quantity(numbers[-1], n) for n in numbers):
        return text.rpartition("=")[2]
    return text


def _collection(text: str) -> tuple[str, list[str]] | None:
    r"""Brackets (`()`, `[)`, `\{\}`, or "" for a bare list) and items; None for a text that is no collection."""
    if text.startswith(r"\{") and text.endswith(r"\}"):
        items = _split(text[2:-2])
        return (r"\{\}", items) if items else None
    if text[:1] in "([" and text[-1:] in ")]" and len(text) > 2:
        items = _split(text[1:-1])
        if items and len(items) > 1:
            return text[0] + text[-1], items
    items = _split(text)
    return ("", items) if items and len(items) > 1 else None


def _split(text: str) -> list[str] | None:
    """`text` cut at the commas and semicolons outside all brackets; None when the brackets do not match."""
    items, depth, start = [], 0, 0
    for position, character in enumerate(text):
        depth += BRACKETS.get(character, 0)
        if depth < 0:
            return None
        if character in ",;" and depth == 0:
            items.append(text[start:position].strip())
            start = position + 1
    items.append(text[start:].strip())
    return items if depth == 0 and all(items) else None


def _same_collection(gold: tuple[str, list[str]], answer: tuple[str, list[str]], judge: Judge) -> bool:
    (gold_brackets, gold_items), (answer_brackets, answer_items) = gold, answer
    if len(gold_items) != len(answer_items):
        return False
    if gold_brackets in UNORDERED and answer_brackets in UNORDERED:
        return _same_items(gold_items, answer_items, judge)
    # A bare list may stand for a tuple; an open end is not a closed one.
    if gold_brackets != answer_brackets and {gold_brackets, answer_brackets} != {"", "()"}:
        return False
    return all(_same(g, a, judge) for g, a in zip(gold_items, answer_items))


def _same_items(gold: list[str], answer: list[str], judge: Judge) -> bool:
    """Equality in any order, each item used once."""
    left = list(answer)
    for item in gold:
        found = next((other for other in left if _same(item, other, judge)), None)
        if found is None:
            return False
        left.remove(found)
    return True
