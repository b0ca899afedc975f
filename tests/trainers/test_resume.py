"""A run that was stopped, however, and goes on gives the same numbers as one that never stopped."""

import random
import shutil
import signal
from collections import Counter

import numpy as np
import pytest
import torch

from agents.models import load_policy
from tests.trainers.runs import Parity, Recorder, go_on, rows, small_config, start, task_keys, weights
from trainers.loop import holding_interrupts, make_learner, train
from trainers.run import Run

FIFTEEN = {"run": {"steps": 15, "save_every": 4, "log_trajectories": 1000}}
# 10 tasks of the split's 50, 2 a step: 5 steps an epoch, 3 epochs.
VARIANTS = {
    "as it is": {},
    "refills": {"algorithm": {"name": "DAPO", "max_generation_batches": 20}, "rollout": {"group_size": 2}},
    "reference": {"algorithm": {"kl_coefficient": 0.1}},
    "minibatches": {"optimizer": {"minibatches": 2, "epochs": 2}},
    "cosine": {"optimizer": {"schedule": "cosine", "warmup_steps": 3, "weight_decay": 0.1}},
    "muon": {"optimizer": {"name": "muon"}, "warm_start": {"steps": 2, "batch_size": 2, "optimizer": "muon"}},
    "evaluations": {"evaluation": {"episodes": 2, "every": 2, "final_samples": 2}},
    "window": {"rollout": {"window": 1}},
    "RLOO": {"algorithm": {"name": "RLOO"}},
    "RLOOpp": {"algorithm": {"name": "RLOOpp"}},
    "statistics over rows": {"algorithm": {"statistics_over": "row"}},
    "PPO": {"algorithm": {"name": "PPO", "critic": {"learning_rate": 1e-2, "warmup_steps": 2}},
            "optimizer": {"minibatches": 2}},
    "PPO, HL-Gauss": {"algorithm": {"name": "PPO", "gae_over": "turn", "critic": {"head": "hl_gauss"}}},
    "FACTOR": {"algorithm": {"name": "FACTOR", "warmup_steps": 4, "decay_steps": 12, "continuations": 1,
                             "continuation_turns": 1, "value_head": {"learning_rate": 1e-2, "window": 3}},
               "environment": {"options": {"turns": 4}}},
    "SERL": {"algorithm": {"name": "SERL", "teacher_steps": 3, "decay_steps": 14}},
    "warm start": {"warm_start": {"steps": 3, "batch_size": 2}},
    "oversampled": {"rollout": {"oversampled_tasks": 1}},
    "LoRA": {"model": {"lora": {"rank": 2}}, "algorithm": {"kl_coefficient": 0.1},
             "warm_start": {"steps": 2, "batch_size": 2}},
    "autocast": {"model": {"autocast": True}, "optimizer": {"gradient_checkpointing": True}},
}


@pytest.fixture(autouse=True)
def interruptible():
    """Whoever runs the tests may have switched Ctrl-C off."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def assert_equal_runs(a, b):
    for name in ("metrics", "trajectories", "evaluations"):
        if (a / f"{name}.jsonl").exists() or name == "metrics":
            assert rows(a, name) == rows(b, name), name
    assert torch.equal(weights(a), weights(b))


def interrupt_in_step(monkeypatch, step):
    """The first action of the step's rollout is interrupted."""
    whole = Parity._step

    def interrupted(env, action):
        monkeypatch.setattr(Parity, "_step", whole)
        signal.raise_signal(signal.SIGINT)
        return whole(env, action)

    class Watching(Recorder):
        def advance(self, metrics):
            super().advance(metrics)
            if self.phases[-1][0] == "training" and self.done == step - 1:
                monkeypatch.setattr(Parity, "_step", interrupted)
    return Watching()


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_run_stopped_three_times_equals_one_never_stopped(variant, tmp_path, monkeypatch):
    sections = VARIANTS[variant] | FIFTEEN
    start(tmp_path / "reference", **sections)
    stopped = Run.create(tmp_path / "stopped", small_config(**sections))
    with pytest.raises(KeyboardInterrupt):  # in the middle of step 4, then after the steps 5 and 7
        train(stopped, interrupt_in_step(monkeypatch, 4))
    assert [path.name for path in stopped.checkpoints] == ["step-000003"]
    assert go_on(stopped.folder, stop_after=5).phases == [("training", 15, 3)]
    assert len(go_on(stopped.folder, stop_after=7).metrics) == 2
    assert len(go_on(stopped.folder).metrics) == 8
    assert_equal_runs(stopped.folder, tmp_path / "reference")
    assert [row["step"] for row in rows(stopped.folder)] == list(range(1, 16))
    assert any(row.get("gradient_norm", 0) > 0 for row in rows(stopped.folder))  # there was something to learn


def test_each_task_comes_once_per_epoch_in_a_new_order(tmp_path):
    start(tmp_path, **FIFTEEN)
    keys = [key for _, key in task_keys(tmp_path)]
    epochs = [keys[:10], keys[10:20], keys[20:]]
    assert all(sorted(epoch) == [f"train {i}" for i in range(10)] for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2] != epochs[0]


def test_a_run_stopped_at_the_end_of_an_epoch_goes_on_with_the_next(tmp_path):
    Run.create(tmp_path, small_config(**FIFTEEN))
    go_on(tmp_path, stop_after=5)
    assert len(go_on(tmp_path).metrics) == 10
    assert set(Counter(key for _, key in task_keys(tmp_path)).values()) == {3}


def test_the_same_seed_gives_the_same_run_and_another_seed_another(tmp_path):
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        start(tmp_path / name, run={"seed": seed})
    assert_equal_runs(tmp_path / "a", tmp_path / "b")
    assert task_keys(tmp_path / "a") != task_keys(tmp_path / "c")
    assert not torch.equal(weights(tmp_path / "a"), weights(tmp_path / "c"))


def test_a_finished_run_has_nothing_left_to_do(tmp_path):
    start(tmp_path, evaluation={"episodes": 2})
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.suffix in (".jsonl", ".safetensors")}
    recorder = go_on(tmp_path)
    assert recorder.metrics == [] and recorder.titles == []
    assert all(path.read_bytes() == content for path, content in before.items())


def test_rows_after_the_last_checkpoint_are_made_again(tmp_path):
    """As after a crash: the logs are ahead of the newest checkpoint, and their last row is half written."""
    sections = {"run": {"steps": 5, "save_every": 2, "log_trajectories": 1000},
                "evaluation": {"episodes": 2, "every": 1}}
    start(tmp_path / "reference", **sections)
    start(tmp_path / "crashed", **sections)
    shutil.rmtree(tmp_path / "crashed" / "checkpoints" / "step-000005")
    for name in ("metrics", "trajectories", "evaluations"):
        with open(tmp_path / "crashed" / f"{name}.jsonl", "ab") as file:
            file.write(b'{"step": 6, "text": "\xf0\x9f')
    assert go_on(tmp_path / "crashed").phases == [("training", 5, 4)]
    assert_equal_runs(tmp_path / "crashed", tmp_path / "reference")


@pytest.mark.parametrize("after", [0, 2, 3])  # before training, between steps, after the last
def test_an_interrupted_evaluation_is_made_up_for(after, tmp_path, monkeypatch):
    sections = {"run": {"steps": 3, "save_every": 0, "log_trajectories": 1000},
                "evaluation": {"episodes": 2, "every": 1}}
    start(tmp_path / "reference", **sections)
    run = Run.create(tmp_path / "stopped", small_config(**sections))
    if after:
        with pytest.raises(KeyboardInterrupt):
            train(run, interrupt_in_step(monkeypatch, after + 1))
    else:
        with pytest.raises(KeyboardInterrupt), monkeypatch.context() as patch:
            patch.setattr(Parity, "_reset", lambda env, task, rng: signal.raise_signal(signal.SIGINT) or "")
            train(run, Recorder())
    assert after not in run.evaluated and len(run.checkpoints) == bool(after)
    go_on(run.folder)
    assert_equal_runs(run.folder, tmp_path / "reference")


def test_an_interrupted_warm_start_starts_over(tmp_path):
    sections = {"warm_start": {"steps": 4, "batch_size": 2}}
    start(tmp_path / "reference", **sections)

    class Impatient(Recorder):
        def advance(self, metrics):
            raise KeyboardInterrupt
    with pytest.raises(KeyboardInterrupt):
        train(Run.create(tmp_path / "stopped", small_config(**sections)), Impatient())
    assert not (tmp_path / "stopped" / "initial").exists()
    assert go_on(tmp_path / "stopped").phases == [("warm start", 4, 0), ("training", 2, 0)]
    assert_equal_runs(tmp_path / "stopped", tmp_path / "reference")


def test_a_run_interrupted_in_its_first_step_starts_from_the_same_policy(tmp_path, monkeypatch):
    start(tmp_path / "reference", warm_start={"steps": 2, "batch_size": 2})
    run = Run.create(tmp_path / "stopped", small_config(warm_start={"steps": 2, "batch_size": 2}))
    with pytest.raises(KeyboardInterrupt), monkeypatch.context() as patch:
        patch.setattr(Parity, "_step", _interrupt_model(Parity._step))
        train(run, Recorder())
    assert run.initial.exists() and not run.checkpoints
    assert go_on(run.folder).phases == [("training", 2, 0)]
    assert_equal_runs(run.folder, tmp_path / "reference")


def _interrupt_model(whole):
    """Interrupts the first action that is not the gold solution's."""
    def step(env, action):
        if not action.startswith("gold"):
            signal.raise_signal(signal.SIGINT)
        return whole(env, action)
    return step


def test_a_checkpoint_loaded_twice_keeps_the_learning_rate(tmp_path):
    sections = {"optimizer": {"schedule": "linear", "learning_rate": 1.0}, "run": {"steps": 4, "save_every": 2}}
    Run.create(tmp_path, small_config(**sections))
    go_on(tmp_path, stop_after=2)
    run = Run.open(tmp_path)
    policy, state = load_policy(str(run.checkpoints[-1]), device="cpu"), run.load_state()
    learner = make_learner(run, policy, state)
    learner.load_state(state["learner"])
    assert learner.schedulers[0].get_last_lr() == [0.5]  # 2 of 4 steps of a line from 1 to 0 are done


def test_an_interrupt_is_held_until_the_step_is_whole():
    done = []
    with pytest.raises(KeyboardInterrupt), holding_interrupts():
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
        done.append(True)
    assert done
    with pytest.raises(FloatingPointError), holding_interrupts():
        raise FloatingPointError


@pytest.mark.parametrize("variant", ["as it is", "refills", "window"])
def test_evaluating_each_step_changes_nothing_in_training(variant, tmp_path):
    base = VARIANTS[variant] | {"run": {"steps": 4, "log_trajectories": 1000}}
    start(tmp_path / "never", **base)
    often = start(tmp_path / "often", **base, evaluation={"episodes": 3, "every": 1, "temperature": 0.5, "samples": 2})
    assert often.titles == ["before training", "after 1 steps", "after 2 steps", "after 3 steps", "after training"]
    for name in ("metrics", "trajectories"):
        assert rows(tmp_path / "never", name) == rows(tmp_path / "often", name)
    assert torch.equal(weights(tmp_path / "never"), weights(tmp_path / "often"))


def test_a_run_leaves_the_global_generators_as_they_were(tmp_path):
    random.seed(1)
    np.random.seed(1)
    torch.manual_seed(1)
    before = random.getstate(), str(np.random.get_state()), torch.get_rng_state()
    start(tmp_path, evaluation={"episodes": 2}, warm_start={"steps": 2}, algorithm={"kl_coefficient": 0.1})
    assert (random.getstate(), str(np.random.get_state())) == before[:2]
    assert torch.equal(torch.get_rng_state(), before[2])
