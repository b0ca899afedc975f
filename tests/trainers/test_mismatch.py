"""The gap between sampling and learning policy: what is reported, and corrections that no algorithm needs to know."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from tests.agents.policies import random_policy
from tests.trainers.test_learner import accumulated, double, random_batch
from trainers.algorithms import DAPO, FACTOR, GRPO
from trainers.config import build_config
from trainers.learner import Learner, OptimizerSettings
from trainers.loss import Counts
from trainers.mismatch import MismatchSettings, correct, finished, importance_weights, mismatch
from trainers.settings import SettingsError

# Two trajectories with token weights 2, 3 and 1/4; as sequences 6 and 1/4.
LOG_RATIO, TRAJECTORY = np.log([2.0, 3.0, 0.25]), np.array([0, 0, 1])


@pytest.mark.parametrize("level, rule, weights", [
    ("token", "truncate", [2, 2, 0.25]), ("token", "mask", [2, 0, 0.25]), ("token", "band", [2, 0, 0]),
    ("sequence", "truncate", [2, 2, 0.25]), ("sequence", "mask", [0, 0, 0.25]), ("sequence", "band", [0, 0, 0])])
def test_weights_by_token_and_by_sequence(level, rule, weights):
    settings = MismatchSettings(level=level, rule=rule, low=0.5, high=2.0)
    np.testing.assert_allclose(importance_weights(LOG_RATIO, TRAJECTORY, settings), weights)


def test_a_weight_of_one_passes_every_rule_and_the_far_ends_stay_finite():
    for rule in ("truncate", "mask", "band"):
        for level in ("token", "sequence"):
            settings = MismatchSettings(level=level, rule=rule)
            assert importance_weights(np.zeros(3), TRAJECTORY, settings).tolist() == [1, 1, 1]
            assert np.isfinite(importance_weights(np.array([900.0, -900, 0]), TRAJECTORY, settings)).all()


def test_what_is_reported_of_two_tokens():
    behaviour = torch.tensor([-2.0, -1.0])
    shares = mismatch(behaviour + torch.tensor([0.0, math.log(3)]), behaviour, Counts(2, 1, 1))
    found = finished({name: float(value) for name, value in shares.items()})
    # Weights 1 and 3. KL by k3: w − 1 − ln w, so 0 and 2 − ln 3. Sample size: 4²/(2·(1 + 9)).
    assert found == pytest.approx({"logprob_gap": math.log(3) / 2, "logprob_gap_max": math.log(3),
                                   "mismatch_kl": (2 - math.log(3)) / 2, "mismatch_sample_size": 0.8}, rel=1e-5)


def off_policy(batch, seed=1):
    """The batch as another policy sampled it, and the learner's log-probabilities."""
    rng = np.random.default_rng(seed)
    logprobs = np.where(batch.trained, rng.uniform(-3, -1, len(batch.trained)), 0).astype(np.float32)
    gap = np.where(batch.trained, rng.normal(0, 0.7, len(batch.trained)), 0).astype(np.float32)
    return replace(batch, behaviour_logprobs=logprobs - gap), logprobs


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("rule", ["truncate", "mask", "band"])
def test_a_corrected_batch_is_whole_and_holds_what_was_sampled(level, rule):
    batch, logprobs = off_policy(random_batch())
    found, metrics = correct(batch, logprobs, MismatchSettings(level=level, rule=rule))
    assert found.token_ids is batch.token_ids and not (found.trained & ~batch.trained).any()
    assert not (found.action_mask & ~found.trained).any() and (found.turn_index[~found.trained] == -1).all()
    assert found.behaviour_logprobs[found.trained].tolist() == logprobs[found.trained].tolist()
    assert not found.advantages[~found.trained].any() and not found.behaviour_logprobs[~found.trained].any()
    left_out = 1 - found.trained.sum() / batch.trained.sum()
    assert metrics["mismatch_left_out"] == pytest.approx(left_out) and (left_out > 0) == (rule != "truncate")
    assert (metrics["mismatch_truncated"] > 0) == (rule == "truncate")
    assert 0 < metrics["mismatch_sample_size"] < 1


def test_where_the_policies_are_the_same_nothing_changes():
    batch = random_batch()
    for level in ("token", "sequence"):
        for rule in ("truncate", "mask", "band"):
            found, metrics = correct(batch, batch.behaviour_logprobs, MismatchSettings(level=level, rule=rule))
            for name in ("trained", "advantages", "behaviour_logprobs", "turn_index", "action_mask"):
                assert np.array_equal(getattr(found, name), getattr(batch, name))
            assert metrics["mismatch_sample_size"] == 1 and metrics["logprob_gap"] == 0 == metrics["mismatch_left_out"]


@pytest.mark.parametrize("algorithm", [GRPO(dual_clip=3.0), DAPO(), FACTOR()])
def test_weighted_advantages_weight_the_gradient(algorithm):
    """One weight for every token, so that the corrected gradient is a multiple of the plain one."""
    policy, batch = double(), random_batch(excluded=False)
    logprobs = Learner(policy, GRPO(), OptimizerSettings())._logprobs(policy.model, batch)
    plain = replace(batch, behaviour_logprobs=logprobs)
    shifted = replace(batch, behaviour_logprobs=np.where(batch.trained, logprobs - np.float32(math.log(1.5)), 0))
    found, _ = correct(shifted, logprobs, MismatchSettings(level="token"))
    whole, _ = accumulated(policy, algorithm, plain)
    weighted, _ = accumulated(policy, algorithm, found)
    torch.testing.assert_close(weighted, 1.5 * whole, rtol=1e-4, atol=1e-5 * float(whole.abs().max()))


def test_the_learner_reports_the_gap_to_the_policy_that_sampled_and_corrects_when_asked():
    batch, _ = off_policy(random_batch())
    found = {}
    for level in ("off", "token"):
        learner = Learner(random_policy(), GRPO(), OptimizerSettings(epochs=2, micro_batch_tokens=40),
                          mismatch=MismatchSettings(level=level))
        found[level] = learner.update(batch, np.random.default_rng(0))
    for name in ("logprob_gap", "logprob_gap_max", "mismatch_kl", "mismatch_sample_size"):
        assert found["token"][name] == pytest.approx(found["off"][name], rel=1e-3) and found["off"][name] > 0
    assert found["off"]["clip_fraction"] > 0.1  # against the policy that sampled
    assert found["token"]["clip_fraction"] < 0.1  # against the learner's own at the start
    assert "mismatch_left_out" in found["token"] and "mismatch_left_out" not in found["off"]


def test_a_batch_of_which_nothing_is_left_trains_nothing():
    batch, _ = off_policy(random_batch())
    policy = random_policy()
    before = [p.clone() for p in policy.model.parameters()]
    learner = Learner(policy, GRPO(), OptimizerSettings(learning_rate=0.1),
                      mismatch=MismatchSettings(level="sequence", rule="band", low=1.0, high=1.0))
    assert learner.update(batch, np.random.default_rng(0))["mismatch_left_out"] == 1
    assert all(torch.equal(old, new) for old, new in zip(before, policy.model.parameters()))


def test_an_empty_band_is_refused():
    with pytest.raises(SettingsError, match=r"a band from low 3.0 to high 2.0 is empty"):
        build_config({"mismatch": {"rule": "band", "low": 3.0}})
