"""Whatever reads a model leaves each of its modules in the mode, training or evaluation, that it was in."""

import numpy as np
import pytest

from agents.agent import ModelAgent
from agents.engine import Request
from agents.rollout import Rollout
from agents.scoring import check_model, score_sequences
from agents.transformers_engine import TransformersEngine
from tests.agents.policies import generate, random_policy
from tests.trainers.runs import Parity
from tests.trainers.trajectories import group, random_conversation
from trainers.algorithms import GRPO
from trainers.batch import pack
from trainers.evaluation import evaluate
from trainers.learner import Learner, OptimizerSettings

IDS = [np.arange(5, 15), np.arange(20, 24)]


def sample(policy):
    generate(TransformersEngine(policy, slots=2), *(Request(prompt_ids=ids, max_new_tokens=3) for ids in IDS))


def play_a_panel(policy):
    agent = ModelAgent(TransformersEngine(policy, slots=2), policy, max_response_tokens=3)
    evaluate(Rollout(Parity), agent, Parity().tasks("heldout")[:2])


def train(policy):
    learner = Learner(policy, GRPO(kl_coefficient=0.1), OptimizerSettings(learning_rate=1e-3))
    rng = np.random.default_rng(0)
    groups = [group(*(random_conversation(rng, 2, float(i)) for i in range(3)))]
    learner.update(pack(groups, GRPO().advantages(groups)), rng)
    assert [module.training for module in learner.reference.modules()] == modes(policy)


def modes(policy) -> list[bool]:
    return [module.training for module in policy.model.modules()]


@pytest.mark.parametrize("use", [
    sample, play_a_panel, train, lambda policy: score_sequences(policy.model, IDS),
    lambda policy: check_model(policy.model), lambda policy: TransformersEngine(policy).load({}, version=1)],
    ids=["sampling", "evaluating", "training", "scoring", "checking", "loading"])
@pytest.mark.parametrize("training", [True, False])
def test_the_mode_of_every_module_stays(use, training):
    policy = random_policy()
    policy.model.train(training)
    policy.model.base_model.layers[0].train(not training)
    before = modes(policy)
    use(policy)
    assert modes(policy) == before and len(set(before)) == 2


def test_scoring_that_fails_leaves_the_mode_as_it_was():
    policy = random_policy()
    policy.model.train()
    with pytest.raises(IndexError):
        score_sequences(policy.model, [np.array([10**6])])
    assert all(modes(policy))
