"""A teacher is the policy itself with more in its prompt: what it says of the very same responses.

`Insertion` says what stands before the prompt and what is added to its last message; neither is ever cut, the history
between them is where the whole would be longer than the model reads. The response ids stay as they were sampled.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from agents.context import ChatTemplate
from agents.models import Policy
from agents.scoring import score_sequences
from agents.trajectory import Turn


class Insertion(NamedTuple):
    """What a teacher reads beside the prompt."""

    before: str = ""
    """Stands before all of it."""
    after: str = ""
    """Ends its last message."""


def feedback(observation: str) -> Insertion:
    """What the environment is about to answer, told in advance (the section's title is SERL's)."""
    return Insertion(after=f"\n\nImmediate feedback from the current step:\n{observation}\n\n"
                           "Take this feedback into account and solve the task.")


def teacher_prompt(template: ChatTemplate, turn: Turn, insertion: Insertion, max_context: int) -> np.ndarray:
    """The prompt of a turn with the insertion in it, at most `max_context` tokens with the response.
    # int64 [prompt_length]

    Raises ValueError where insertion and response alone are longer.
    """
    tokenizer = template.tokenizer
    text, closing = tokenizer.decode(turn.prompt_ids, clean_up_tokenization_spaces=False), template.closing
    kept = text.removesuffix(closing)
    before, middle, after = (tokenizer(part, add_special_tokens=False).input_ids for part in (
        insertion.before, kept, insertion.after + text[len(kept):]))
    room = max_context - len(before) - len(after) - len(turn.response_ids)
    if room < 0:
        raise ValueError(f"a teacher's insertion of {len(before) + len(after)} tokens leaves no room for a response of "
                         f"{len(turn.response_ids)} in {max_context}: shorten what the teacher is told")
    return np.array(before + middle[max(0, len(middle) - room):] + after, dtype=np.int64)


def teacher_logprobs(policy: Policy, turns: Sequence[Turn], insertions: Sequence[Insertion | None],
                     temperature: float, *, max_tokens: int, width: int) -> list[np.ndarray]:
    """Log-probabilities of each turn's response ids after its prompt with the insertion; those of the behaviour policy
    where there is none. # float32 [response_length] each"""
    template = ChatTemplate(policy.tokenizer, policy.end_ids)
    result = [turn.logprobs for turn in turns]
    told = [i for i, insertion in enumerate(insertions) if insertion is not None and len(turns[i].response_ids)]
    sequences = [np.concatenate([teacher_prompt(template, turns[i], insertions[i], policy.max_context),
                                 turns[i].response_ids]) for i in told]
    for i, logprobs in zip(told, score_sequences(policy.model, sequences, temperature, max_tokens=max_tokens,
                                                 width=width)):
        result[i] = logprobs[len(logprobs) - len(turns[i].response_ids):]
    return result
