"""Where the final answer stands in a completion. No expression is given to sympy here."""

import re

from rewards.equivalence import same_answer
from rewards.tags import hide_thinking

BOX = re.compile(r"\\f?box(?:ed)?\s*\{")
ANSWER_TAG = re.compile(r"<answer>((?:(?!<answer>).)*?)</answer>", re.DOTALL | re.IGNORECASE)
HASHES = re.compile(r"^[ \t]*####([^\n]*)", re.MULTILINE)
ANSWER_LINE = re.compile(r"\banswer\b[ \t*_]{0,4}(?:is\b|:|=)([^\n]*)", re.IGNORECASE)
OR = re.compile(r"\bor\b", re.IGNORECASE)
OR_FIRST = re.compile(r"\W*or\b", re.IGNORECASE)
DOUBT = re.compile(r"\bor,?\s+(?:maybe|perhaps|possibly)\b((?:[^.!?\n]|\.(?=\d))*)", re.IGNORECASE)
SENTENCE_END = re.compile(r"[.!?]\s|\n\s*\n")
MAX_JOIN = 60
"""Characters between two boxes within which any "or" joins them; further apart it must stand in their sentence."""
MAX_HEDGE = 400
"""Characters of such a sentence, and of the text behind the last box, in which a hedge is looked for."""



def last_answer_tag(text: str) -> str | None:
    """Content of the last closed `<answer>` outside `<think>`, stripped; None without one."""
    text = hide_thinking(text)
    return _last_of_spans([(m.start(), m.end(), m.group(1)) for m in ANSWER_TAG.finditer(text)], text)


def extract_answer(text: str) -> str | None:
    r"""The final answer of a completion, or None where it holds none.

    Outside `<think>`, in this order: the last `\boxed{...}`, the last closed `<answer>`, the last `#### ...`, the last
    line of the form `Answer: ...` / `the answer is ...`. None as well when the last box is empty or never closed
    (a truncated text), and for a hedge: boxes (or tags) of different values joined by "or".
    """
    text = hide_thinking(text)
    boxes = _boxes(text)
    if boxes is None or boxes:
        return _last_of_spans(boxes or [], text)
    if ANSWER_TAG.search(text):
        return last_answer_tag(text)
    if hashes := HASHES.findall(text):
        return hashes[-1].strip() or None
    lines = ANSWER_LINE.findall(text)
    return _plain(lines[-1]) if lines else None


def _boxes(text: str) -> list[tuple[int, int, str]] | None:
    """Start, end and content of every outermost box, in order; None when the last one is never closed."""
    boxes, position = [], 0
    while match := BOX.search(text, position):
        end = _closing_brace(text, match.end())
        if end is None:
            return None
        boxes.append((match.start(), end + 1, _unboxed(text[match.end():end].strip())))
        position = end + 1
    return boxes


def _unboxed(text: str) -> str:
    r"""`text` without a box around all of it (`\boxed{\boxed{9}}`)."""
    for _ in range(4):
        match = BOX.match(text)
        if match and _closing_brace(text, match.end()) == len(text) - 1:
            text = text[match.end():-1].strip()
    return text


def _closing_brace(text: str, start: int) -> int | None:
    """Index of the brace that closes the one before `start`; escaped braces do not count."""
    depth, position = 1, start
    while position < len(text):
        character = text[position]
        if character == "\\":
            position += 1
        elif character == "{":
            depth += 1
        elif character == "}":
            depth -= 1
            if depth == 0:
                return position
        position += 1
    return None


def _last_of_spans(spans: list[tuple[int, int, str]], text: str) -> str | None:
    """Content of the last span; None when it is empty, joined by "or" to one of another value, or followed by doubt
    ("or maybe 7")."""
    if not spans:
        return None
    answer = spans[-1][2].strip()
    others = [doubt.group(1) for doubt in DOUBT.finditer(text, spans[-1][1], spans[-1][1] + MAX_HEDGE)
              if re.search(r"\d", doubt.group(1))]
    for (_, end, content), (start, _, _) in zip(spans[-2::-1], spans[:0:-1]):
        if not _joins(text[end:start]):
            break
        others.append(content)
    if any(other.strip() != answer and not same_answer(other, answer, lambda first, second: False)
           for other in others):
        return None
    return answer or None


def _joins(between: str) -> bool:
    """Whether the text between two boxes makes them alternatives by an "or"."""
    if len(" ".join(between.split())) <= MAX_JOIN:
        return OR.search(between) is not None
    *before, last = SENTENCE_END.split(between)
    return len(last) <= MAX_HEDGE and (OR_FIRST.match(last) if before else OR.search(last)) is not None


def _plain(line: str) -> str | None:
    """An answer line without Markdown emphasis and its sentence's end."""
    sentence = re.split(r"(?<=[^\s.])\.(?:\s|$)", line.replace("**", "").replace("__", ""), maxsplit=1)[0]
    return sentence.lstrip(" \t:=*_").strip().rstrip("*_").strip() or None
