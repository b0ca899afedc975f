"""Finding tagged blocks in what a model wrote."""

import re
from collections.abc import Sequence

THINKING = re.compile(r"<think>.*?(?:</think>|\Z)", re.DOTALL | re.IGNORECASE)
OPENED_IN_THE_PROMPT = re.compile(r"\A.*</think>", re.DOTALL | re.IGNORECASE)


def hide_thinking(text: str) -> str:
    """`text` with its thinking replaced by as many spaces, so that positions stay.

    Thinking is `<think>` up to the next `</think>`, or to the end where it is never closed; and everything before a
    `</think>` without an opening tag, since many chat templates write `<think>` into the prompt.
    """
    def blank(match: re.Match) -> str:
        return " " * len(match.group())
    return OPENED_IN_THE_PROMPT.sub(blank, THINKING.sub(blank, text))


def last_block(response: str, tags: Sequence[str]) -> re.Match | None:
    """The last closed `<tag>...</tag>` outside thinking; group 1 is the tag, group 2 the content."""
    pattern = re.compile(rf"<({'|'.join(map(re.escape, tags))})>((?:(?!<\1>).)*?)</\1>", re.DOTALL)
    matches = list(pattern.finditer(hide_thinking(response)))
    return matches[-1] if matches else None
