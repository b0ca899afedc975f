"""Supervised fine-tuning on transcripts: an environment's own gold solutions, or saved trajectories."""

from collections.abc import Callable, Iterator, Sequence

import numpy as np

from agents.agent import ScriptedAgent
from agents.models import Policy
from agents.rollout import Rollout
from agents.trajectory import Group, Trajectory
from envs.core import Task, TextEnv
from trainers.algorithms.sft import SFT
from trainers.batch import pack
from trainers.learner import Learner


def gold_trajectories(rollout: Rollout, policy: Policy, tasks: Sequence[Task], seed: int) -> list[Trajectory]:
    """The environment's gold solution of each task, in the token ids that the policy would have read and written."""
    groups, _ = rollout.run(ScriptedAgent("gold", policy), tasks, group_size=1, seed=seed)
    return [trajectory for group in groups for trajectory in group.trajectories]


def gold_texts(env: TextEnv, tasks: Sequence[Task], seed: int) -> list[str]:
    """What the agent and the environment say in the gold episodes of `tasks`: the text a tokenizer is trained on."""
    texts: list[str] = []
    rng = np.random.default_rng(seed)
    for task in tasks:
        observation, _ = env.reset(options={"task": task})
        texts.append(observation)
        for response in env.gold(rng):
            observation, _, terminated, truncated, _ = env.step(env.parse(response).text)
            texts += [response, observation]
            if terminated or truncated:
                break
    return texts


def fine_tune(learner: Learner, batches: Iterator[Sequence[Trajectory]], rng: np.random.Generator,
              on_step: Callable[[int, dict[str, float]], None] = lambda step, metrics: None) -> None:
    """One gradient step on each batch of trajectories: maximum likelihood of the agent's tokens, of no others."""
    algorithm = SFT()
    for step, trajectories in enumerate(batches):
        group = Group(trajectories=tuple(trajectories))
        on_step(step, learner.update(pack([group], algorithm.advantages([group])), rng))
