"""A teacher is the policy itself with more in its prompt: what it says of the very same responses.

`Insertion` says what stands before the prompt and what is added to its last message; neither is ever cut, the history
between them is where the whole would be longer than the model reads. The response ids stay as they were sampled.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from agents.context import ChatTemplate
from agents.models import Policy
from agents.packing import pack_rows, token_parts
from agents.scoring import can_share, final_hidden, token_divergence
from agents.trajectory import Turn, starts_with
from trainers.batch import Batch
from trainers.distributed import in_step, score_over_ranks


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

    Where nothing is added to the last message the prompt's own ids stay, what was sampled among them as it was
    sampled. Raises ValueError where insertion and response alone are longer.
    """
    tokenizer, prompt, end = template.tokenizer, turn.prompt_ids.tolist(), ""
    opening = prompt[:1] if prompt[:1] == [tokenizer.bos_token_id] else []  # a beginning of text stays the first token
    prompt = prompt[len(opening):]
    if insertion.after:
        text, closing = tokenizer.decode(prompt, clean_up_tokenization_spaces=False), template.closing
        kept = text.removesuffix(closing)
        prompt, end = tokenizer(kept, add_special_tokens=False).input_ids, insertion.after + text[len(kept):]
    before, after = (tokenizer(part, add_special_tokens=False).input_ids for part in (insertion.before, end))
    told = len(opening) + len(before) + len(after)
    room = max_context - told - len(turn.response_ids)
    if room < 0:
        raise ValueError(f"a teacher's insertion of {told} tokens leaves no room for a response of "
                         f"{len(turn.response_ids)} in {max_context}: shorten what the teacher is told")
    return np.array(opening + before + prompt[max(0, len(prompt) - room):] + after, dtype=np.int64)


def teacher_prompts(policy: Policy, turns: Sequence[Turn],
                    insertions: Sequence[Insertion | None]) -> list[np.ndarray | None]:
    """`teacher_prompt` of each turn; None without an insertion and where nothing was sampled."""
    template = ChatTemplate(policy.tokenizer, policy.end_ids)
    return [teacher_prompt(template, turn, insertion, policy.max_context)
            if insertion is not None and len(turn.response_ids) else None
            for turn, insertion in zip(turns, insertions, strict=True)]


def teacher_logprobs(model: PreTrainedModel, turns: Sequence[Turn], prompts: Sequence[np.ndarray | None],
                     temperature: float, *, max_tokens: int, width: int) -> list[np.ndarray]:
    """Log-probabilities of each turn's response ids after the teacher's prompt; those of the behaviour policy where
    there is none. # float32 [response_length] each

    Turns whose prompts go on from what came before are read in one pass.
    """
    sequences: list[np.ndarray] = [np.zeros(0, np.int64)]
    places: dict[int, tuple[int, int]] = {}  # of a turn: its sequence, and where in it the response begins
    for i, (turn, prompt) in enumerate(zip(turns, prompts, strict=True)):
        if prompt is None:
            continue
        if not starts_with(prompt, sequences[-1]):
            sequences.append(prompt)
        sequences[-1] = np.concatenate([prompt, turn.response_ids])
        places[i] = len(sequences) - 1, len(prompt)
    found = score_over_ranks(model, sequences, temperature, max_tokens=max_tokens, width=width) if places else []
    result = [turn.logprobs for turn in turns]
    for i, (sequence, start) in places.items():
        result[i] = found[sequence][start:start + len(turns[i].response_ids)]
    return result


def teacher_divergence(model: PreTrainedModel, states: Tensor, teacher: PreTrainedModel, part: Batch,
                       temperature: float, *, max_tokens: int, width: int) -> Tensor:
    """KL(π_T‖π) over the whole vocabulary at the tokens of actions that the teacher has a prompt for, else 0.
    # float32 [trained]

    `states` are the policy's hidden states before the trained tokens of `part`; the teacher gets no gradient.
    """
    trained = np.flatnonzero(part.trained)
    turns = np.stack([part.trajectory_index, part.turn_index], axis=1)[trained]
    sequences, ours, theirs = [], [], []  # of each turn: what the teacher reads, and its action's tokens on both sides
    for turn in np.split(np.arange(len(trained)), np.flatnonzero(np.diff(turns, axis=0).any(1)) + 1):
        prompt = part.teacher_prompts.get(tuple(turns[turn[0]].tolist())) if len(turn) else None
        action = np.flatnonzero(part.action_mask[trained[turn]])
        if prompt is not None and len(action):
            sequences.append(np.concatenate([prompt, part.token_ids[trained[turn]]]))
            ours.append(turn[action])
            theirs.append(len(prompt) + action - 1)
    result = states.new_zeros(len(trained), dtype=torch.float32)
    for some in in_step(list(token_parts([len(sequence) for sequence in sequences], max_tokens))):
        if not some:  # a sharded teacher's forward needs all ranks
            with torch.no_grad():
                final_hidden(teacher, pack_rows([part.token_ids[:1]], 1, share=False))
            continue
        rows = pack_rows([sequences[i] for i in some], width, share=can_share(teacher))
        starts = np.cumsum([0, *(len(sequences[i]) for i in some)])
        before, at = (torch.from_numpy(np.concatenate(places)).to(states.device) for places in (
            [rows.places[start + theirs[i]] for i, start in zip(some, starts)], [ours[i] for i in some]))
        with torch.no_grad():
            told = final_hidden(teacher, rows)[before]
        result = result.index_copy(0, at, token_divergence(teacher, told, model, states[at], temperature))
    return result
