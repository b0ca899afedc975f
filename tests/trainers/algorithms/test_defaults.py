"""Without settings an algorithm is what its paper ran (docs/algorithms.md names where ours differ)."""

import pytest

from trainers.algorithms import ADRS, DAPO, FACTOR, GRPO, PPO, RLOO, SDAR, SERL, STAMP, GiGPO, PlanPO, RLOOpp, SkillSD

LOSS = {"clip_low": 0.2, "clip_high": 0.2, "dual_clip": None, "ratio": "token", "aggregation": "token_mean",
        "kl_coefficient": 0.0, "kl_estimator": "k3", "entropy_coefficient": 0.0, "mask_truncated": False}
GROUP = LOSS | {"normalise_by_std": True, "statistics_over": "trajectory"}
TOOL_USE = LOSS | {"ratio": "sequence", "aggregation": "sequence_mean_token_sum", "kl_coefficient": 1e-3,
                   "entropy_coefficient": 1e-3}


@pytest.mark.parametrize("algorithm, right", [
    (GRPO, GROUP),
    (DAPO, GROUP | {"clip_high": 0.28, "max_generation_batches": 10, "overlong_length": None, "overlong_buffer": 4096,
                    "overlong_factor": 1.0}),
    (RLOO, TOOL_USE), (RLOOpp, TOOL_USE | {"target_std": 0.3}),
    (PPO, LOSS | {"gae_over": "token", "discount": 1.0, "gae_lambda": 1.0, "critic.head": "scalar",
                  "critic.learning_rate": 1e-5, "critic.value_clip": 0.5, "critic.bins": 101, "critic.lowest": -0.1,
                  "critic.highest": 1.1, "critic.sigma": 0.024}),
    (GiGPO, GROUP | {"step_weight": 1.0, "gamma": 0.95, "invalid_penalty": 0.1, "similarity": None}),
    (PlanPO, LOSS | {"aggregation": "turn_mean_token_mean", "alpha_initial": 0.1, "alpha_final": 0.05,
                     "total_steps": 150, "turn_group": "flat", "turn_members": "all_active", "floor": None}),
    (STAMP, GROUP | {"unit_credit": 0.03, "step_cap": 0.1, "renormalise": False, "cite_answers": False,
                     "rubric_weight": 0.0}),
    (ADRS, GROUP | {"form": "additive", "eta": 0.02, "teacher_clip": 0.2, "adaptive_clip": True, "sign": 1,
                    "positive_only": False, "standardise_over": "turn", "gate": "L2", "gate_position": "after_whiten",
                    "gate_sharpness": 2.0, "gate_temperature": 1.0, "standardise_gate": False, "eta_decay_steps": 0,
                    "shaping_warmup_steps": 20, "shaping_steps": 50, "shaping_entropy_coefficient": 0.01}),
    (SDAR, GROUP | {"distillation_coefficient": 0.01, "gate_sharpness": 5.0}),
    (SkillSD, GROUP | {"distillation_coefficient": 0.01}),
    (SERL, GROUP | {"mixing": 0.5, "decay_steps": 50, "weight_clip": 0.2, "teacher_steps": 10}),
    (FACTOR, LOSS | {"aggregation": "turn_mean_token_mean", "outcome": "reward", "baseline": "leave_one_out",
                     "warmup_steps": 10, "decay_steps": 50, "allocation": 0.7, "allocation_temperature": 1.0,
                     "gap_clip": 3.0, "teacher_kl_coefficient": 1.0, "continuations": 4, "continuation_turns": 15,
                     "value_head.width": 1024, "value_head.learning_rate": 1e-4, "value_head.target_decay": 0.995,
                     "value_head.window": 10, "value_head.samples": 256})], ids=lambda v: getattr(v, "__name__", ""))
def test_the_defaults_are_the_paper_s(algorithm, right):
    made = algorithm()
    for name, value in right.items():
        *section, last = name.split(".")
        assert getattr(getattr(made, section[0]) if section else made, last) == value, name
