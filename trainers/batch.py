"""From trajectories to the tokens that a learner reads: no padding, every sampled token once, exactly as sampled.

Turns whose prompts extend what came before become one sequence; where a prompt does not (a window, a rewritten
history), a new sequence begins. Example of one trajectory (P prompt, A action, E environment; 1 marks trained tokens):

    ids      P0 P1 A0 A1 E0 E1 A2
    trained  0  0  1  1  0  0  1
    turn    -1 -1  0  0 -1 -1  1
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import TypeVar

import numpy as np

from agents.trajectory import Group, Trajectory, starts_with
from trainers.credit import Credit
from trainers.loss import Counts

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True, eq=False)
class Batch:
    """Concatenated sequences; those of one trajectory stand together."""

    token_ids: np.ndarray  # int64 [tokens]
    trained: np.ndarray
    """Sampled by the agent, of a trajectory that is not excluded. # bool [tokens]"""
    action_mask: np.ndarray
    """Trained and part of the executable action. # bool [tokens]"""
    behaviour_logprobs: np.ndarray
    """0 where not trained. # float32 [tokens]"""
    advantages: np.ndarray
    """0 where not trained. # float32 [tokens]"""
    turn_index: np.ndarray
    """Within the trajectory; -1 where not trained. # int64 [tokens]"""
    trajectory_index: np.ndarray
    """Within the whole batch, at every token. # int64 [tokens]"""
    sequence_lengths: np.ndarray  # int64 [sequences]
    extra: dict[str, np.ndarray]
    """What the algorithm put into `Credit.extra`, 0 where not trained. # float32 [tokens] each"""
    reference_logprobs: np.ndarray | None = None
    """Where the algorithm needs them; 0 where not trained. # float32 [tokens]"""
    teacher_prompts: Mapping[tuple[int, int], np.ndarray] = field(default_factory=dict)
    """By trajectory and turn, those of `Credit.teacher_prompts`."""
    step: int = 0
    """Updates before this batch's."""

    @property
    def counts(self) -> Counts:
        """Units with at least one trained token."""
        turns = self.trajectory_index * (self.turn_index.max(initial=0) + 1) + self.turn_index
        return Counts(tokens=int(self.trained.sum()), turns=len(np.unique(turns[self.trained])),
                      sequences=len(np.unique(self.trajectory_index[self.trained])),
                      action_tokens=int(self.action_mask.sum()), actions=len(np.unique(turns[self.action_mask])))

    def sequences(self) -> list[np.ndarray]:
        """The token ids of each sequence."""
        ends = np.cumsum(self.sequence_lengths)
        return [self.token_ids[end - length:end] for end, length in zip(ends, self.sequence_lengths)]

    def select(self, trajectories: Sequence[int]) -> "Batch":
        """The part of the batch that belongs to these trajectories."""
        at = np.isin(self.trajectory_index, trajectories)
        starts = np.cumsum(self.sequence_lengths) - self.sequence_lengths
        per_token = {f.name: getattr(self, f.name)[at] for f in fields(self)
                     if isinstance(getattr(self, f.name), np.ndarray) and f.name != "sequence_lengths"}
        return replace(self, **per_token, sequence_lengths=self.sequence_lengths[at[starts]],
                       extra={name: values[at] for name, values in self.extra.items()})

    def trained_trajectories(self) -> tuple[np.ndarray, np.ndarray]:
        """The trajectories with a trained token, and how many tokens each has. # int64 [trajectories] each"""
        wanted = np.unique(self.trajectory_index[self.trained])
        return wanted, np.bincount(self.trajectory_index, minlength=1)[wanted]

    def apart(self) -> tuple["Batch", "Batch"]:
        """The trajectories with an advantage at any token, and those without."""
        moving = np.unique(self.trajectory_index[self.advantages != 0])
        return self.select(moving), self.select(np.setdiff1d(self.trajectory_index, moving))

    def minibatches(self, count: int, rng: np.random.Generator) -> Iterator["Batch"]:
        """`count` disjoint parts of nearly equally many trajectories, drawn at random; one is the batch as it is.

        Some are empty where there are fewer trajectories.
        """
        trajectories = np.unique(self.trajectory_index)
        if count == 1:
            yield self
            return
        for part in np.array_split(rng.permutation(trajectories), count):
            yield self.select(part)


def pack(groups: Sequence[Group], credits: Sequence[Sequence[Credit]], step: int = 0) -> Batch:
    """The batch of all trajectories of `groups` with their credit. Raises ValueError where credit and tokens differ."""
    packed = [(part, credit) for group, group_credits in zip(groups, credits, strict=True)
              for trajectory, credit in zip(group.trajectories, group_credits, strict=True)
              for part in [_pack_trajectory(trajectory, credit)] if part is not None]
    parts = [part for part, _ in packed]
    if not parts:
        raise ValueError("no tokens to train on: every trajectory is empty")
    names = [name for name in parts[0] if name != "extra"]
    columns = {name: np.concatenate([part[name] for part in parts]) for name in names}
    extra_names = {name for part in parts for name in part["extra"]}
    extra = {name: np.concatenate([part["extra"].get(name, np.zeros(len(part["token_ids"]), np.float32))
                                   for part in parts]) for name in extra_names}
    index = np.repeat(np.arange(len(parts)), [len(part["token_ids"]) for part in parts])
    prompts = {(i, turn): prompt for i, (_, credit) in enumerate(packed)
               for turn, prompt in enumerate(credit.teacher_prompts) if prompt is not None}
    return Batch(**columns, trajectory_index=index, extra=extra, teacher_prompts=prompts, step=step)


def pack_uncredited(groups: Sequence[Group]) -> Batch:
    """All that was sampled, before credit is given: for models that score it."""
    return pack(groups, [[Credit.uniform(trajectory, 0.0) for trajectory in group.trajectories] for group in groups])


def per_turn(groups: Sequence[Group], values: np.ndarray) -> list[list[list[np.ndarray]]]:
    """One number for each sampled token, in order, as an array for each group, trajectory and turn. # [sampled tokens]
    """
    lengths = [len(turn.response_ids) for group in groups for trajectory in group.trajectories
               for turn in trajectory.turns]
    return by_turn(groups, np.split(values, np.cumsum(lengths)))


def by_turn(groups: Sequence[Group], values: Iterable[T]) -> list[list[list[T]]]:
    """One thing for each turn, in order, by group, trajectory and turn."""
    turns = iter(values)
    return [[[next(turns) for _ in trajectory.turns] for trajectory in group.trajectories] for group in groups]


def sequence_starts(trajectory: Trajectory) -> list[int]:
    """The turns at which a new sequence begins, because the prompt does not extend what came before."""
    starts, before = [], None
    for index, turn in enumerate(trajectory.turns):
        if before is None or not starts_with(turn.prompt_ids, before):
            starts.append(index)
        before = np.concatenate([turn.prompt_ids, turn.response_ids])
    return starts


def _pack_trajectory(trajectory: Trajectory, credit: Credit) -> dict | None:
    if not trajectory.turns:
        return None
    _check(trajectory, credit)
    starts = [*sequence_starts(trajectory), len(trajectory.turns)]
    lengths = [len(trajectory.turns[end - 1].prompt_ids) + len(trajectory.turns[end - 1].response_ids)
               for end in starts[1:]]
    total = sum(lengths)
    columns = {"token_ids": np.zeros(total, np.int64), "trained": np.zeros(total, bool),
               "action_mask": np.zeros(total, bool), "behaviour_logprobs": np.zeros(total, np.float32),
               "advantages": np.zeros(total, np.float32), "turn_index": np.full(total, -1, np.int64)}
    extra = {name: np.zeros(total, np.float32) for name in credit.extra}
    offset = 0
    for first, end, length in zip(starts, starts[1:], lengths):
        last = trajectory.turns[end - 1]
        columns["token_ids"][offset:offset + length] = np.concatenate([last.prompt_ids, last.response_ids])
        for index in range(first, end) if not credit.excluded else ():
            turn = trajectory.turns[index]
            at = slice(offset + len(turn.prompt_ids), offset + len(turn.prompt_ids) + len(turn.response_ids))
            columns["trained"][at] = True
            columns["behaviour_logprobs"][at] = turn.logprobs
            columns["advantages"][at] = credit.advantages[index]
            columns["turn_index"][at] = index
            columns["action_mask"][at.start + turn.action_span[0]:at.start + turn.action_span[1]] = True
            for name, values in credit.extra.items():
                extra[name][at] = values[index]
        offset += length
    return {**columns, "sequence_lengths": np.array(lengths, np.int64), "extra": extra}


def _check(trajectory: Trajectory, credit: Credit) -> None:
    lengths = [len(turn.response_ids) for turn in trajectory.turns]
    for name, values in {"advantages": credit.advantages, **credit.extra}.items():
        if [len(v) for v in values] != lengths:
            raise ValueError(f"{name} of {[len(v) for v in values]} tokens for turns of {lengths} tokens "
                             f"(task {trajectory.task.key!r})")
    if any(len(turn.prompt_ids) == 0 for turn in trajectory.turns):
        raise ValueError(f"a turn of task {trajectory.task.key!r} has an empty prompt: nothing predicts its first "
                         "token. (A server of chat completions gives no token ids: its episodes are for evaluation)")
