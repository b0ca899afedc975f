"""What holds for every algorithm: what the agent did not sample has no part in the loss."""

from dataclasses import replace

import numpy as np
import pytest
import torch

import trainers.algorithms
from agents.trajectory import Group
from envs.core import Task
from tests.agents.policies import random_policy
from tests.trainers.trajectories import conversation
from trainers import learner as learner_module
from trainers.algorithms import find_algorithm
from trainers.batch import pack
from trainers.learner import Learner, OptimizerSettings

NAMES = sorted(set(trainers.algorithms.__all__) - {"Algorithm", "Needs", "Scores", "find_algorithm"})
OPTIONS = {"ADRS": {"shaping_warmup_steps": 0, "eta": 0.5}, "RLOO": {"kl_coefficient": 0.0},
           "RLOOpp": {"kl_coefficient": 0.0}}


def played(*observation):
    """A won and a lost episode of two turns, with a state, an action of one token and an observation in between."""
    task = Task(key="", env_id="turngym/ALFWorld-v0", data={"evidence": {"entities": []}})
    talks = [conversation([5, 6], [7, 8], observation, [9, 10, 11], reward=reward, success=reward > 0, task=task)
             for reward in (1.0, 0.0)]
    return Group(trajectories=[replace(talk, turns=[
        replace(turn, action_span=(0, 1), state_key=str(t), observation="seen", logprobs=[-5.0] * len(turn.logprobs))
        for t, turn in enumerate(talk.turns)]) for talk in talks])


def packed(learner, some):
    return pack([some], learner.algorithm.advantages([some], learner.score([some], 0), 0))


@pytest.mark.parametrize("name", NAMES)
def test_c1_the_environment_s_tokens_have_no_gradient_and_do_not_count(name, monkeypatch):
    policy = random_policy(max_position_embeddings=4096)
    learner = Learner(policy, find_algorithm(name)(**OPTIONS.get(name, {})), OptimizerSettings())
    batch, kept = packed(learner, played(12, 13, 14)), []

    def final_hidden(model, rows, whole=learner_module.final_hidden, **options):
        kept.append((whole(model, rows, **options).detach().requires_grad_(), rows.places))
        return kept[-1][0]
    monkeypatch.setattr(learner_module, "final_hidden", final_hidden)
    learner.accumulate_gradients(batch)
    ((hidden, places),) = kept
    gradient, predicts = hidden.grad[torch.from_numpy(places)], np.append(batch.trained[1:], False)
    assert not gradient[~predicts].any() and gradient[predicts].any()
    assert batch.counts == packed(learner, played(12)).counts
