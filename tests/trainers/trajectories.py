"""Trajectories made by hand."""

from collections.abc import Sequence

import numpy as np

from agents.trajectory import Group, Trajectory, Turn


def conversation(*parts: Sequence[int], reward: float | None = 0.0, **options) -> Trajectory:
    """One growing conversation from alternating parts: prompt, action, observation, action, ..."""
    turns, history = [], []
    for i, part in enumerate(parts):
        if i % 2:
            turns.append(Turn(prompt_ids=np.array(history), response_ids=np.array(part),
                              logprobs=-0.01 * np.array(part, np.float32)))
        history = [*history, *part]
    return Trajectory(turns=turns, reward=reward, **options)


def random_conversation(rng: np.random.Generator, turns: int, reward: float | None) -> Trajectory:
    parts = [rng.integers(5, 250, rng.integers(1, 6)).tolist() for _ in range(2 * turns)]
    return conversation(*parts, reward=reward)


def group(*trajectories: Trajectory) -> Group:
    return Group(trajectories=trajectories)
