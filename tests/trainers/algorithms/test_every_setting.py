"""No setting of GiGPO, PlanPO, STAMP, ADRS, SDAR and SkillSD is without effect on what they say of a batch."""

from dataclasses import fields, replace

import numpy as np
import pytest

from agents.trajectory import Turn
from envs.core import Task
from tests.trainers.algorithms.groups import group, played
from tests.trainers.test_algorithms import tokens
from trainers.algorithms import ADRS, SDAR, STAMP, Algorithm, GiGPO, PlanPO, Scores, SkillSD, find_algorithm

UNITS = [{"id": name, "aliases": [name], "documents": [document]}
         for name, document in [("x", "a"), ("y", "b"), ("gold", "c")]]
TASK = Task(key="", env_id="turngym/ALFWorld-v0", family="heat", data={"evidence": {"entities": UNITS},
                                                                      "answers": ["gold"]})
LOSS_INPUT = replace(tokens(), extra={"teacher_logprobs": tokens().behaviour_logprobs + 0.5}, step=4)
OVER_GIGPO = find_algorithm("ADRS+GiGPO")
BASE = {ADRS: {"shaping_warmup_steps": 0, "eta": 0.5}, OVER_GIGPO: {"shaping_warmup_steps": 0, "eta": 0.5}}
# setting: another value
GROUP = {"normalise_by_std": False, "statistics_over": "row"}
CASES = {
    GiGPO: GROUP | {"step_weight": 0.5, "gamma": 0.5, "invalid_penalty": 0.3, "similarity": 0.9},
    PlanPO: {"normalise_by_std": False, "alpha_initial": 0.3, "alpha_final": 0.01, "total_steps": 5,
             "turn_group": "per_turn", "turn_members": "success_only", "floor": 0.5, "aggregation": "token_mean"},
    STAMP: GROUP | {"unit_credit": 0.05, "step_cap": 0.01, "renormalise": True, "cite_answers": True,
                    "rubric_weight": 0.5},
    ADRS: GROUP | {"form": "multiplicative", "eta": 0.1, "teacher_clip": 0.1, "adaptive_clip": False, "sign": -1,
                   "positive_only": True, "standardise_over": "batch", "gate": "none",
                   "gate_position": "before_whiten", "gate_sharpness": 9.0, "gate_temperature": 9.0,
                   "standardise_gate": True, "eta_decay_steps": 6, "shaping_warmup_steps": 5, "shaping_steps": 3,
                   "skills": "mine.toml",
                   "shaping_entropy_coefficient": 0.1},
    SDAR: GROUP | {"skills": "mine.toml", "distillation_coefficient": 0.1, "gate_sharpness": 1.0},
    SkillSD: GROUP | {"skills": "mine.toml", "distillation_coefficient": 0.1},
    OVER_GIGPO: {"gate": "L3"},
}


@pytest.fixture(scope="module")
def batch():
    """Two groups of short and long, won and lost episodes, with states, evidence and invalid actions; and scores."""
    rng = np.random.default_rng(0)

    def episode(won, count):
        turns = [Turn(response_ids=range(rng.integers(1, 6)), state_key=str(rng.integers(3)),
                      observation=f"This is the room {rng.integers(9)}.", valid=t % 2 == 0,
                      reward=won * (t == count - 1), info={"exposed": ["abz"[t % 3]]}) for t in range(count)]
        turns[-1] = replace(turns[-1], info={"exposed": ["c"], "cited": ["a", "b"]})
        return replace(played(won), turns=turns, task=TASK)
    groups = [group(episode(1.0, 2), episode(1.0, 5), episode(0.0, 3), episode(0.0, 6)),
              group(episode(0.5, 3), episode(0.0, 5), episode(0.0, 2))]
    teacher = [[[rng.normal(-1 - won.reward, 1, len(turn.response_ids)) for turn in won.turns]
                for won in one.trajectories] for one in groups]
    return groups, Scores(teacher_logprobs=teacher)


def said(algorithm, batch):
    groups, scores = batch
    insertion = None if algorithm.__dict__.get("skills") else algorithm.insertion(groups[0].trajectories[0], 0, 4)
    credits = algorithm.advantages(groups, scores, 4)
    loss = algorithm.loss(LOSS_INPUT)[0].item()
    return (insertion, algorithm.aggregation, loss,
            [turn.tolist() for members in credits for credit in members for turn in credit.advantages])


@pytest.mark.parametrize("algorithm, name", [(algorithm, name) for algorithm, cases in CASES.items() for name in cases],
                         ids=lambda value: getattr(value, "__name__", value))
def test_every_setting_shows(algorithm, name, batch):
    base = BASE.get(algorithm, {})
    assert said(algorithm(**base | {name: CASES[algorithm][name]}), batch) != said(algorithm(**base), batch)


@pytest.mark.parametrize("algorithm", [GiGPO, PlanPO, STAMP, ADRS, SDAR, SkillSD])
def test_the_table_holds_every_setting(algorithm):
    assert set(CASES[algorithm]) >= {f.name for f in fields(algorithm)} - {f.name for f in fields(Algorithm)}
