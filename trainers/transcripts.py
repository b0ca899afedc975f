"""Trajectories as lines of JSON, and back: for supervised fine-tuning, analysis and `scripts.view`.

One object a line. `messages` are what was said; `sequences` are the rows that training reads (`mask` is 1 at sampled
ids); `turns` say where each response lies in its row and what it brought about. A line that holds `messages` and no
`schema` is a conversation from elsewhere: it has no ids until `tokenise` makes them.
"""

import json
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt, ValidationError
from pydantic_core import from_json

from agents.context import ChatTemplate, Context
from agents.models import Policy
from agents.trajectory import Status, Trajectory, Turn
from envs.core import Task, json_value
from trainers.batch import sequence_starts
from trainers.files import replacing

SCHEMA = 1
LINE_ENDS = {code: f"\\u{code:04x}" for code in (0x85, 0x2028, 0x2029)}
"""What `str.splitlines` takes for the end of a line and JSON does not escape."""


class _Record(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)


class _Message(_Record):
    role: Literal["system", "user", "assistant"]
    content: str


class _Sequence(_Record):
    ids: list[Annotated[int, Field(ge=0, lt=2**31)]]
    mask: list[Annotated[int, Field(ge=0, le=1)]]
    logprobs: list[float]


class _Task(_Record):
    key: str
    env_id: str
    split: str
    seed: int
    family: str
    data: dict[str, Any]


class _Turn(_Record):
    sequence: NonNegativeInt
    start: NonNegativeInt
    """Where the response begins in its sequence; the prompt is all before it."""
    length: NonNegativeInt
    action: str
    action_span: tuple[int, int]
    reward: float
    valid: bool
    finish_reason: str
    weight_version: int
    weight_versions: tuple[tuple[int, int], ...] = ()
    state_key: str
    info: dict[str, Any]
    imitate: bool = True


class _Trajectory(_Record):
    schema_: Literal[1] = Field(alias="schema")
    step: int | None = None
    task: _Task
    messages: list[_Message]
    sequences: list[_Sequence]
    turns: list[_Turn]
    reward: float | None
    success: bool
    score: float
    status: Status
    context_breaks: NonNegativeInt


class _Conversation(BaseModel):
    model_config = ConfigDict(strict=True)
    messages: list[_Message]


def write_trajectories(path: str | Path, trajectories: Iterable[Trajectory]) -> None:
    """One line each, into a file that appears whole or not at all."""
    with replacing(path) as file:
        file.writelines(trajectory_line(trajectory) + "\n" for trajectory in trajectories)


def trajectory_line(trajectory: Trajectory, *, step: int | None = None) -> str:
    """A trajectory as one line of strict JSON; `step` says when in a run it was sampled.

    Raises ValueError where a number is NaN or infinite or a value is none that JSON knows.
    """
    sequences, turns = rows(trajectory)
    task = trajectory.task
    record = {
        "schema": SCHEMA, **({} if step is None else {"step": step}),
        "task": {"key": task.key, "env_id": task.env_id, "split": task.split, "seed": task.seed, "family": task.family,
                 "data": task.data},
        "messages": messages(trajectory), "reward": trajectory.reward, "success": trajectory.success,
        "score": trajectory.score, "status": trajectory.status, "context_breaks": trajectory.context_breaks,
        "turns": turns, "sequences": sequences}
    try:
        line = json.dumps(record, ensure_ascii=False, allow_nan=False, default=json_value)
    except (ValueError, TypeError) as error:
        raise ValueError(f"a trajectory of task {task.key!r} cannot be written as JSON: {error}") from error
    return line.encode("utf-8", "replace").decode("utf-8").translate(LINE_ENDS)  # no lone surrogates


def read_trajectories(path: str | Path) -> list[Trajectory]:
    """What `write_trajectories` wrote, or conversations. Raises ValueError that names the file, the line and the fault.
    """
    with open(path, "rb") as file:
        return [_read(line.strip(), f"{path} line {number}") for number, line in enumerate(file, 1) if line.strip()]


def messages(trajectory: Trajectory) -> list[dict[str, str]]:
    """System (where there is one) and user, then assistant and user turn by turn; the last is the last observation."""
    said = [{"role": "system", "content": trajectory.system_prompt}] if trajectory.system_prompt else []
    said.append({"role": "user", "content": trajectory.first_observation})
    for turn in trajectory.turns:
        said += [{"role": "assistant", "content": turn.text}, {"role": "user", "content": turn.observation}]
    return said


def tokenise(trajectory: Trajectory, policy: Policy) -> Trajectory:
    """The same conversation in the ids that `policy` would have read and written, for supervised training.

    Log-probabilities and action spans are unknown, hence zero. A response that was cut gets no end token.
    """
    template = ChatTemplate(policy.tokenizer, policy.end_ids)
    context = Context(template, trajectory.system_prompt, trajectory.first_observation)
    turns = []
    for turn in trajectory.turns:
        prompt_ids, ids = context.prompt_ids, template.response_ids(turn.text)
        context.add(ids, turn.text, turn.observation)
        if turn.finish_reason == "length" and len(ids) and int(ids[-1]) in policy.end_ids:
            ids = ids[:-1]
        turns.append(replace(turn, prompt_ids=prompt_ids, response_ids=ids, logprobs=None, action_span=(0, 0)))
    return replace(trajectory, turns=tuple(turns), context_breaks=context.breaks)


def fits(trajectory: Trajectory, policy: Policy) -> bool:
    """Whether the trajectory's ids are this policy's: every response decodes to its text."""
    def spoken(turn: Turn) -> str:
        ids = turn.response_ids
        return policy.tokenizer.decode(ids[:-1] if len(ids) and int(ids[-1]) in policy.end_ids else ids)

    size = len(policy.tokenizer)
    return all(len(turn.prompt_ids) and max(turn.prompt_ids.max(), turn.response_ids.max(initial=0)) < size
               and spoken(turn) == turn.text for turn in trajectory.turns)


def rows(trajectory: Trajectory) -> tuple[list[dict], list[dict]]:
    """A record's `sequences` (ids, mask, logprobs of each training row) and `turns` (their places and outcomes)."""
    starts = [*sequence_starts(trajectory), len(trajectory.turns)]
    sequences, turns = [], []
    for first, end in pairwise(starts):
        last = trajectory.turns[end - 1]
        ids = np.concatenate([last.prompt_ids, last.response_ids])
        mask, logprobs = np.zeros(len(ids), np.int64), np.zeros(len(ids), np.float32)
        for turn in trajectory.turns[first:end]:
            start, length = len(turn.prompt_ids), len(turn.response_ids)
            mask[start:start + length], logprobs[start:start + length] = 1, turn.logprobs
            turns.append({
                "sequence": len(sequences), "start": start, "length": length, "action": turn.action,
                "action_span": turn.action_span, "reward": turn.reward, "valid": turn.valid,
                "finish_reason": turn.finish_reason, "weight_version": turn.weight_version,
                "state_key": turn.state_key, "info": turn.info,
                **({"weight_versions": turn.weight_versions} if turn.weight_versions else {}),
                **({} if turn.imitate else {"imitate": False})})
        sequences.append({"ids": ids.tolist(), "mask": mask.tolist(), "logprobs": logprobs.tolist()})
    return sequences, turns


def _read(line: bytes, place: str) -> Trajectory:
    try:
        data = from_json(line, allow_inf_nan=False)
        if isinstance(data, dict) and "schema" not in data:
            return _conversation(_Conversation.model_validate_json(line))
        return _trajectory(_Trajectory.model_validate_json(line))
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise ValueError(f"{place}: {where and where + ': '}{first['msg']}") from None
    except ValueError as error:
        # The parser knows one line, whose number would confuse.
        raise ValueError(f"{place}: {str(error).replace('at line 1 column', 'at column')}") from None


def _trajectory(record: _Trajectory) -> Trajectory:
    system_prompt, first_observation, said = _speech(record.messages)
    if len(said) != len(record.turns):
        raise ValueError(f"{len(said)} assistant messages but {len(record.turns)} turns")
    for index, sequence in enumerate(record.sequences):
        if not len(sequence.ids) == len(sequence.mask) == len(sequence.logprobs):
            raise ValueError(f"sequences.{index}: {len(sequence.ids)} ids, {len(sequence.mask)} mask values and "
                             f"{len(sequence.logprobs)} logprobs; there must be one of each per token")
    masks = [np.zeros(len(sequence.ids), np.int64) for sequence in record.sequences]
    turns = []
    for index, (turn, (text, observation)) in enumerate(zip(record.turns, said)):
        if turn.sequence >= len(masks) or turn.start + turn.length > len(masks[turn.sequence]):
            raise ValueError(f"turns.{index}: {turn.length} tokens from {turn.start} on are not in sequence "
                             f"{turn.sequence}")
        sequence, at = record.sequences[turn.sequence], slice(turn.start, turn.start + turn.length)
        masks[turn.sequence][at] = 1
        turns.append(Turn(
            prompt_ids=np.array(sequence.ids[:turn.start], np.int64), response_ids=np.array(sequence.ids[at], np.int64),
            logprobs=np.array(sequence.logprobs[at], np.float32), weight_version=turn.weight_version,
            weight_versions=turn.weight_versions, finish_reason=turn.finish_reason, text=text, action=turn.action,
            action_span=turn.action_span, observation=observation, reward=turn.reward, state_key=turn.state_key,
            valid=turn.valid, info=turn.info, imitate=turn.imitate))
    for index, (sequence, mask) in enumerate(zip(record.sequences, masks)):
        if sequence.mask != mask.tolist():
            raise ValueError(f"sequences.{index}: the mask is not 1 exactly where the turns' responses are")
    return Trajectory(
        task=Task(**record.task.model_dump()), turns=tuple(turns), reward=record.reward, success=record.success,
        score=record.score, status=record.status, context_breaks=record.context_breaks,
        first_observation=first_observation, system_prompt=system_prompt)


def _conversation(record: _Conversation) -> Trajectory:
    system_prompt, first_observation, said = _speech(record.messages)
    if not said:
        raise ValueError("messages: no assistant message to learn from")
    nothing = np.zeros(0, np.int64)
    turns = tuple(Turn(prompt_ids=nothing, response_ids=nothing, text=text, observation=observation)
                  for text, observation in said)
    return Trajectory(turns=turns, reward=None, first_observation=first_observation, system_prompt=system_prompt)


def _speech(said: Sequence[_Message]) -> tuple[str, str, list[tuple[str, str]]]:
    """(system prompt, first observation, (response, observation) of each turn)."""
    opening = 1 if said and said[0].role == "system" else 0
    for index, message in enumerate(said[opening:]):
        expected = "assistant" if index % 2 else "user"
        if message.role != expected:
            raise ValueError(f"messages.{index + opening}: role {message.role!r} where {expected!r} is due")
    if len(said) == opening:
        raise ValueError("messages: no user message")
    texts = [message.content for message in said[opening:]]
    observations = [*texts[2::2], ""]  # a conversation may end with what the assistant said
    return said[0].content if opening else "", texts[0], list(zip(texts[1::2], observations))
