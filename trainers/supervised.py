"""Supervised fine-tuning on transcripts: an environment's own gold solutions, or saved trajectories."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import numpy as np

from agents.agent import ScriptedAgent
from agents.models import Policy
from agents.rollout import Rollout, derive_seed
from agents.trajectory import Group, Trajectory
from envs.core import Task, TextEnv
from trainers.algorithms.sft import SFT
from trainers.algorithms.skill_teacher import skill_insertion
from trainers.batch import pack
from trainers.learner import Learner, OptimizerSettings
from trainers.teacher import Insertion, feedback, teacher_prompts


def gold_trajectories(rollout: Rollout, policy: Policy, tasks: Sequence[Task], seed: int, *,
                      window: int | None = None) -> list[Trajectory]:
    """The environment's gold solution of each task, in the token ids that the policy would have read and written.

    `window`: see `agents.context.Context`.
    """
    groups, _ = rollout.run(ScriptedAgent("gold", policy, window=window), tasks, group_size=1, seed=seed)
    return [trajectory for group in groups for trajectory in group.trajectories]


def told(policy: Policy, trajectories: Sequence[Trajectory], seed: int, *, skill_share: float, feedback_share: float,
         skills: str | None = None) -> list[Trajectory]:
    """The trajectories, some of them (drawn by `seed`, in these shares) with the same responses after the prompts of a
    teacher that reads skills, as ADRS's does, or what the environment will answer, as FACTOR's. So what a teacher is
    told means something to the policy. `skills`: see `trainers.skills.load_skills`.

    Raises SettingsError where there are no skills, ValueError where a prompt has no room for what is told.
    """
    def insertions(trajectory: Trajectory, drawn: float) -> list[Insertion | None]:
        if drawn < skill_share:
            return [skill_insertion(trajectory, skills)] * len(trajectory.turns)
        return [feedback(turn.observation) if drawn < skill_share + feedback_share else None
                for turn in trajectory.turns]

    drawn = np.random.default_rng(seed).random(len(trajectories))
    prompts = iter(teacher_prompts(
        policy, [turn for trajectory in trajectories for turn in trajectory.turns],
        [insertion for pair in zip(trajectories, drawn) for insertion in insertions(*pair)]))
    return [replace(trajectory, turns=tuple(turn if prompt is None else replace(turn, prompt_ids=prompt)
                                            for turn, prompt in zip(trajectory.turns, prompts)))
            for trajectory in trajectories]


def gold_texts(env: TextEnv, tasks: Sequence[Task], seed: int) -> list[str]:
    """What the agent and the environment say in the gold episodes of `tasks`: the text a tokenizer is trained on.

    A task without a gold solution is left out. Raises LookupError where none has one.
    """
    texts: list[str] = []
    missing: LookupError | None = None
    rng = np.random.default_rng(seed)
    for task in tasks:
        observation, _ = env.reset(options={"task": task})
        try:
            responses = env.gold(rng)
        except LookupError as error:
            missing = error
            continue
        texts.append(observation)
        for response in responses:
            observation, _, terminated, truncated, _ = env.step(env.parse(response).text)
            texts += [response, observation]
            if terminated or truncated:
                break
    if missing and not texts:
        raise missing
    return texts


def sample_batches(trajectories: Sequence[Trajectory], batch_size: int, steps: int,
                   rng: np.random.Generator) -> Iterator[list[Trajectory]]:
    """`steps` batches; every trajectory comes once per epoch, in an order shuffled anew in each. Raises ValueError for
    none."""
    if not trajectories:
        raise ValueError("no trajectories to train on")
    order: list[int] = []
    for _ in range(steps):
        while len(order) < batch_size:
            order += rng.permutation(len(trajectories)).tolist()
        yield [trajectories[i] for i in order[:batch_size]]
        del order[:batch_size]


def fine_tune_policy(policy: Policy, trajectories: Sequence[Trajectory], *, steps: int, batch_size: int,
                     learning_rate: float, seed: int, optimizer: str = "adamw", first_token_weight: float = 1.0,
                     on_step: Callable[[int, dict[str, float]], None] = lambda step, metrics: None,
                     **settings: int) -> None:
    """Fine-tune `policy` on the trajectories. The learning rate rises over the first twentieth of the steps, then falls
    to 0 as a cosine; `settings` are further `OptimizerSettings`."""
    chosen = OptimizerSettings(name=optimizer, learning_rate=learning_rate, schedule="cosine", beta2=0.98,
                               weight_decay=0.01, warmup_steps=max(1, steps // 20), **settings)
    rng = np.random.default_rng(derive_seed(seed, "warm start"))
    learner = Learner(policy, SFT(first_token_weight=first_token_weight), chosen, total_steps=steps)
    fine_tune(learner, sample_batches(trajectories, batch_size, steps, rng), rng, on_step)


def fine_tune(learner: Learner, batches: Iterator[Sequence[Trajectory]], rng: np.random.Generator,
              on_step: Callable[[int, dict[str, float]], None] = lambda step, metrics: None) -> None:
    """One gradient step on each batch of trajectories: maximum likelihood of the agent's tokens, of no others."""
    for step, trajectories in enumerate(batches):
        group = Group(trajectories=tuple(trajectories))
        on_step(step, learner.update(pack([group], learner.algorithm.advantages([group])), rng))
