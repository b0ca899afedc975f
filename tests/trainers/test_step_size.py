"""The guard on the learning rate: two constraints, one of which binds."""

import math

import numpy as np
import pytest

from tests.agents.policies import random_policy
from tests.trainers.test_learner import random_batch
from trainers.algorithms import GRPO
from trainers.learner import Learner, OptimizerSettings
from trainers.step_size import StepSizeGuard, StepSizeSettings, step_size_limit

BOTH = StepSizeSettings(batch_radius=0.2, run_radius=5.0)


def test_the_smaller_constraint_binds():
    # G = 100, T = 50: 0.5 · 0.2/(S·100) against 0.5 · 5/(50·100) = 5e-4; they meet at S = T·R_batch/R_crit = 2.
    assert step_size_limit(100.0, 1.0, 50, BOTH) == pytest.approx(5e-4)
    assert step_size_limit(100.0, 2.0, 50, BOTH) == pytest.approx(5e-4)
    assert step_size_limit(100.0, 4.0, 50, BOTH) == pytest.approx(2.5e-4)


def test_without_staleness_the_first_constraint_falls_away_and_without_radii_both():
    assert step_size_limit(100.0, 0.0, 50, BOTH) == pytest.approx(5e-4)
    assert step_size_limit(100.0, 0.0, 50, StepSizeSettings(batch_radius=0.2)) == math.inf
    assert step_size_limit(100.0, 9.0, 50, StepSizeSettings()) == math.inf


@pytest.mark.parametrize("factor", [2.0, 10.0])
def test_the_limit_shrinks_in_proportion(factor):
    for growth, staleness, settings in ((factor, 1.0, BOTH), (1.0, factor, StepSizeSettings(batch_radius=0.2))):
        assert step_size_limit(growth, staleness, 50, settings) == pytest.approx(
            step_size_limit(1.0, 1.0, 50, settings) / factor)


def test_growth_is_learnt_from_old_batches_alone_and_kept():
    guard = StepSizeGuard(StepSizeSettings(batch_radius=0.2), 50)
    guard.observe(1e-7, 0.0, 1e-3)
    assert guard.limit(2.0) == math.inf
    guard.observe(0.4, 2.0, 1e-3)  # G = 200
    assert guard.limit(2.0) == pytest.approx(0.5 * 0.2 / (2 * 200))
    guard.observe(0.8, 2.0, 1e-3)  # G = 0.9 · 200 + 0.1 · 400 = 220
    other = StepSizeGuard(StepSizeSettings(batch_radius=0.2), 50)
    other.load_state(guard.state())
    assert other.limit(2.0) == guard.limit(2.0) == pytest.approx(0.5 * 0.2 / (2 * 220))


def test_the_learner_keeps_to_the_limit_where_batches_are_old():
    learner = Learner(random_policy(), GRPO(), OptimizerSettings(learning_rate=1e-3),
                      step_size=StepSizeSettings(batch_radius=0.1))
    rng, batch = np.random.default_rng(0), random_batch()
    rates = [learner.update(batch, rng, staleness=age)["learning_rate"] for age in (2.0, 2.0, 0.0)]
    # The first update has nothing to go by; the last batch is fresh.
    assert rates[0] == rates[2] == 1e-3 and 0 < rates[1] < 1e-3
