"""No setting is without effect: each changes a run's numbers, its files, its plan, or is refused."""

import json

import pytest
import torch

from agents.rollout import RolloutError
from agents.transformers_engine import TransformersEngine
from tests.trainers.runs import Parity, Recorder, rows, small_config, weights
from trainers import learner
from trainers.algorithms import DAPO, FACTOR, GRPO, PPO, RLOO, SERL, RLOOpp
from trainers.config import TrainConfig
from trainers.loop import check_device, train
from trainers.plan import plan
from trainers.run import Run
from trainers.settings import SettingsError, merge, read_overrides, setting_names
from trainers.skills import FOLDER

NUMBERS, EVALUATIONS, TRAJECTORIES, FILES = "numbers", "evaluations", "trajectories", "files"
PLAN, ROWS, THREADS, ERROR, REFUSED = "plan", "rows", "threads", "error", "refused"
ENGINES, RATES, PLACEMENT = "engines", "rates", "placement"

OFF_POLICY = "--optimizer.epochs 4 --optimizer.learning_rate 0.1"
WARM = "--warm_start.steps 2 --warm_start.batch_size 2"
SKILLS = f"{WARM} --warm_start.skills {FOLDER / 'countdown.toml'}"
VLLM = "--model.head_size 32 --engine.name vllm"
KL = "--algorithm.kl_coefficient 0.5 --optimizer.epochs 3"
SUM = "--algorithm.aggregation sequence_mean_token_sum_norm --algorithm.aggregation_length 7"
LORA = "--model.lora.rank 2"
EVALUATE = "--evaluation.episodes 4"
CORRECTED = "--mismatch.level token --mismatch.high 1.0"
STALE = "--rollout.max_staleness 3 --run.steps 6"
SAVE = "--run.steps 4 --run.save_every 1"
OVERLONG = "--algorithm.overlong_length 11 --algorithm.overlong_buffer 8"
HL_GAUSS = "--algorithm.critic.head hl_gauss --algorithm.critic.learning_rate 0.01"
HINDSIGHT = "--algorithm.warmup_steps 0 --environment.options.turns 4 --run.steps 3 --optimizer.learning_rate 0.05"

# setting: (another value, what shows it, the run in which it matters)
SETTINGS = {
    "environment.id": ("turngym/Countdown-v0", NUMBERS, ""), "environment.split": ("other", TRAJECTORIES, ""),
    "environment.tasks": ("3", TRAJECTORIES, ""), "environment.options": ("{turns = 1}", NUMBERS, ""),
    "model.path": ("no/such", PLAN, ""), "model.dtype": ("bfloat16", NUMBERS, ""),
    "model.device": ("cuda:99", REFUSED, ""), "model.hidden_size": ("48", NUMBERS, ""),
    "model.layers": ("2", NUMBERS, ""), "model.vocabulary": ("320", NUMBERS, "--environment.id turngym/Countdown-v0"),
    "model.autocast": ("true", NUMBERS, ""), "model.lora.rank": ("2", NUMBERS, ""),
    "model.lora.alpha": ("500.0", NUMBERS, LORA), "model.lora.targets": ('["q_proj"]', NUMBERS, LORA),
    "warm_start.steps": ("1", NUMBERS, WARM), "warm_start.demonstrations": ("1", NUMBERS, WARM),
    "warm_start.options": ("{turns = 1}", NUMBERS, WARM), "warm_start.skill_share": ("0.9", NUMBERS, SKILLS),
    "warm_start.feedback_share": ("0.9", NUMBERS, WARM),
    "warm_start.skills": (FOLDER / "search.toml", NUMBERS, f"{SKILLS} --warm_start.skill_share 0.9"),
    "warm_start.batch_size": ("1", NUMBERS, WARM),
    "warm_start.first_token_weight": ("3.0", NUMBERS, WARM),
    "warm_start.optimizer": ("adamw", NUMBERS, WARM), "warm_start.learning_rate": ("0.01", NUMBERS, WARM),
    "model.head_size": ("8", NUMBERS, ""), "engine.name": ("vllm", PLAN, "--model.head_size 32"),
    "engine.in_process": ("true", PLAN, VLLM),
    "engine.servers": ('["http://a:1"]', PLAN, VLLM), "engine.replicas": ("2", PLAN, VLLM),
    "engine.devices": ('["0"]', PLAN, VLLM), "engine.python": ("other", PLAN, VLLM),
    "engine.arguments": ('["--enforce-eager"]', PLAN, VLLM), "engine.dtype": ("bfloat16", PLAN, VLLM),
    "engine.transfer": ("nccl", PLAN, VLLM), "engine.gap_limit": ("0.5", PLAN, VLLM),
    **{f"cluster.{part}.{name}": (value, PLACEMENT, "") for part in ("learners", "replicas", "workers")
       for name, value in (("count", "2"), ("cpus", "3.0"), ("gpus", "2.0"))},
    "rollout.tasks_per_step": ("3", NUMBERS, ""), "rollout.group_size": ("3", NUMBERS, ""),
    "rollout.temperature": ("0.5", NUMBERS, ""), "rollout.max_response_tokens": ("3", NUMBERS, ""),
    "rollout.max_context_tokens": ("16", NUMBERS, ""), "rollout.window": ("1", NUMBERS, ""),
    "rollout.concurrency": ("90000", PLAN, ""), "rollout.retries": ("0", NUMBERS, ""),
    "rollout.episode_seconds": ("1e-9", ERROR, "--rollout.retries 0"),
    "rollout.engine_seconds": ("1e-9", ERROR, "--rollout.retries 0"),
    "rollout.environment_seconds": ("1e-9", ERROR, "--rollout.retries 0 --environment.options={blocking=true}"),
    "rollout.oversampled_tasks": ("1", TRAJECTORIES, ""), "rollout.max_staleness": ("1", NUMBERS, ""),
    "rollout.keep_cache": ("false", ENGINES, "--rollout.max_staleness 1"),
    "mismatch.level": ("token", NUMBERS, ""), "mismatch.rule": ("mask", NUMBERS, CORRECTED),
    "mismatch.low": ("1.0", NUMBERS, f"{CORRECTED} --mismatch.rule band"), "mismatch.high": ("2.0", NUMBERS, CORRECTED),
    "step_size.batch_radius": ("1e-9", RATES, STALE), "step_size.run_radius": ("1e-9", RATES, STALE),
    "optimizer.name": ("muon", NUMBERS, ""), "optimizer.learning_rate": ("0.02", NUMBERS, ""),
    "optimizer.schedule": ("linear", NUMBERS, ""),
    "optimizer.warmup_steps": ("3", NUMBERS, ""), "optimizer.weight_decay": ("0.5", NUMBERS, ""),
    "optimizer.beta1": ("0.5", NUMBERS, ""), "optimizer.beta2": ("0.5", NUMBERS, ""),
    "optimizer.max_gradient_norm": ("1e-9", NUMBERS, ""), "optimizer.epochs": ("2", NUMBERS, ""),
    "optimizer.minibatches": ("2", NUMBERS, ""), "optimizer.micro_batch_tokens": ("9000000", PLAN, ""),
    "optimizer.row_tokens": ("64", ROWS, ""), "optimizer.gradient_checkpointing": ("true", PLAN, ""),
    "evaluation.split": ("other", EVALUATIONS, EVALUATE), "evaluation.episodes": ("0", EVALUATIONS, EVALUATE),
    "evaluation.samples": ("2", EVALUATIONS, EVALUATE), "evaluation.temperature": ("0", EVALUATIONS, EVALUATE),
    "evaluation.every": ("1", EVALUATIONS, EVALUATE), "evaluation.final_samples": ("2", EVALUATIONS, EVALUATE),
    "evaluation.seed": ("1", EVALUATIONS, EVALUATE),
    "run.steps": ("3", NUMBERS, ""), "run.max_environment_steps": ("1", NUMBERS, ""),
    "run.max_sampled_tokens": ("1", NUMBERS, ""), "run.seed": ("1", NUMBERS, ""), "run.save_every": ("0", FILES, SAVE),
    "run.keep_checkpoints": ("1", FILES, SAVE), "run.log_trajectories": ("1", TRAJECTORIES, ""),
    "run.threads": ("7", THREADS, ""), "run.ranks": ("7", PLAN, ""),
}
ALGORITHM = {
    "clip_low": ("0.001", NUMBERS, OFF_POLICY), "clip_high": ("0.001", NUMBERS, OFF_POLICY),
    "aggregation": ("sequence_mean_token_mean", NUMBERS, ""), "aggregation_length": ("9", NUMBERS, SUM),
    "kl_coefficient": ("0.9", NUMBERS, KL), "kl_estimator": ("k2", NUMBERS, KL),
    "entropy_coefficient": ("0.5", NUMBERS, ""), "mask_truncated": ("true", NUMBERS, "--run.seed 2"),
}
RATIO = {"dual_clip": ("1.001", NUMBERS, OFF_POLICY), "ratio": ("sequence", NUMBERS, OFF_POLICY)}
GROUP = RATIO | {"normalise_by_std": ("false", NUMBERS, ""), "statistics_over": ("row", NUMBERS, "--run.steps 4")}
ALGORITHMS = {
    GRPO: ALGORITHM | GROUP,
    DAPO: ALGORITHM | GROUP | {
        "max_generation_batches": ("1", NUMBERS, "--rollout.group_size 2 --run.seed 4"),
        "overlong_length": ("12", NUMBERS, OVERLONG), "overlong_buffer": ("3", NUMBERS, OVERLONG),
        "overlong_factor": ("0.1", NUMBERS, OVERLONG)},
    RLOO: ALGORITHM | {"ratio": ("token", REFUSED, ""), "dual_clip": ("3.0", REFUSED, "")},
    RLOOpp: ALGORITHM | {"ratio": ("token", REFUSED, ""), "dual_clip": ("3.0", REFUSED, ""),
                         "target_std": ("0.1", NUMBERS, "--optimizer.learning_rate 0.001")},
    PPO: ALGORITHM | RATIO | {
        "gae_over": ("turn", NUMBERS, ""), "discount": ("0.5", NUMBERS, ""), "gae_lambda": ("0.5", NUMBERS, ""),
        "normalise_advantages": ("false", NUMBERS, ""), "critic.head": ("hl_gauss", NUMBERS, ""),
        "critic.learning_rate": ("0.01", NUMBERS, ""), "critic.warmup_steps": ("1", NUMBERS, ""),
        "critic.value_clip": ("0.001", NUMBERS, "--algorithm.critic.learning_rate 0.01 --optimizer.epochs 3"),
        "critic.bins": ("11", NUMBERS, HL_GAUSS), "critic.lowest": ("-1.0", NUMBERS, HL_GAUSS),
        "critic.highest": ("2.0", NUMBERS, HL_GAUSS), "critic.sigma": ("0.1", NUMBERS, HL_GAUSS)},
    FACTOR: ALGORITHM | RATIO | {
        "aggregation": ("token_mean", REFUSED, ""), "aggregation_length": ("9", REFUSED, ""),
        "outcome": ("success", NUMBERS, ""), "baseline": ("none", NUMBERS, ""),
        "warmup_steps": ("2", NUMBERS, HINDSIGHT), "decay_steps": ("3", NUMBERS, HINDSIGHT),
        "allocation": ("0.1", NUMBERS, HINDSIGHT), "allocation_temperature": ("9.0", NUMBERS, HINDSIGHT),
        "gap_clip": ("0.01", NUMBERS, HINDSIGHT), "teacher_kl_coefficient": ("0.1", NUMBERS, HINDSIGHT),
        "continuations": ("2", NUMBERS, HINDSIGHT), "continuation_turns": ("1", NUMBERS, HINDSIGHT),
        "value_head.width": ("16", NUMBERS, HINDSIGHT), "value_head.learning_rate": ("0.1", NUMBERS, HINDSIGHT),
        "value_head.target_decay": ("0.1", NUMBERS, HINDSIGHT), "value_head.window": ("1", NUMBERS, HINDSIGHT),
        "value_head.samples": ("1", NUMBERS, HINDSIGHT)},
    SERL: ALGORITHM | GROUP | {
        "mixing": ("0.1", NUMBERS, "--run.steps 3"), "decay_steps": ("2", NUMBERS, "--run.steps 3"),
        "weight_clip": ("0.01", NUMBERS, "--run.steps 3"), "teacher_steps": ("1", NUMBERS, "--run.steps 3")},
}
CASES = [(GRPO, name, *case) for name, case in SETTINGS.items()] + [
    (algorithm, f"algorithm.{name}", *case) for algorithm, cases in ALGORITHMS.items() for name, case in cases.items()]


def test_the_table_holds_every_setting():
    assert set(SETTINGS) == {name for name in setting_names(TrainConfig) if not name.startswith("algorithm")}
    for algorithm, cases in ALGORITHMS.items():
        assert set(cases) == set(setting_names(algorithm))


@pytest.fixture(scope="module")
def seen():
    """What was observed of a run, by its settings."""
    return {}


def observe(algorithm, arguments, folder, monkeypatch):
    """Everything that a run shows, or how it ends."""
    overrides = ["--algorithm.name", algorithm.__name__, *arguments]
    config = small_config(**merge({"rollout": {"retries": 8}}, read_overrides(overrides)))
    shapes, calls, whole, threads = [], [], Parity._step, torch.get_num_threads()
    engines, load = set(), TransformersEngine.load

    def pack_rows(sequences, width, *, share, whole=learner.pack_rows):
        found = whole(sequences, width, share=share)
        shapes.append(tuple(found.token_ids.shape))
        return found

    def step(env, action):  # now and then an action fails
        calls.append(action)
        if not action.startswith("gold") and len(calls) % 29 == 0:
            raise OSError("now and then")
        return whole(env, action)

    def load_weights(engine, weights, version):
        engines.add(engine._keep_cache)
        load(engine, weights, version)

    check_device(config)
    found = {PLAN: list(plan(config)), PLACEMENT: list(plan(config, cluster=True))}
    if config.model.path != "tiny" or config.engine.name == "vllm":
        return found
    with monkeypatch.context() as patch:
        patch.setattr(learner, "pack_rows", pack_rows)
        patch.setattr(Parity, "_step", step)
        patch.setattr(TransformersEngine, "load", load_weights)
        try:
            train(Run.create(folder, config), Recorder())
        except RolloutError as error:
            return found | {ERROR: type(error)}
        found[THREADS] = torch.get_num_threads()
        torch.set_num_threads(threads)
    return found | {
        NUMBERS: (json.dumps(rows(folder)), weights(folder).tolist()), ROWS: shapes, ERROR: None,
        ENGINES: engines, RATES: min(row.get("learning_rate", 1.0) for row in rows(folder)),
        TRAJECTORIES: rows(folder, "trajectories"),
        EVALUATIONS: rows(folder, "evaluations") if (folder / "evaluations.jsonl").exists() else [],
        FILES: sorted(path.name for path in folder.glob("checkpoints/*"))}


@pytest.mark.parametrize("algorithm, name, value, shown, base", CASES,
                         ids=[f"{algorithm.__name__} {name}" for algorithm, name, *_ in CASES])
def test_every_setting_shows(algorithm, name, value, shown, base, tmp_path, monkeypatch, seen):
    other = [*base.split(), f"--{name}={value}"]
    if shown == REFUSED:
        with pytest.raises(SettingsError, match=name):
            observe(algorithm, other, tmp_path, monkeypatch)
        return
    if (algorithm, base) not in seen:
        seen[algorithm, base] = observe(algorithm, base.split(), tmp_path / "base", monkeypatch)
    changed = observe(algorithm, other, tmp_path / "other", monkeypatch)
    assert changed.get(shown) != seen[algorithm, base].get(shown)
