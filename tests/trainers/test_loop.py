"""The loop gathers what an algorithm wants, loses nothing in silence, and trains with every algorithm and context."""

import json

import numpy as np
import pytest
import torch

import envs
from agents.agent import ModelAgent
from agents.models import load_policy
from agents.rollout import Rollout, RolloutError, RolloutReport
from agents.trajectory import Group, Trajectory, Turn
from tests.agents.policies import random_policy
from tests.trainers.runs import Parity, Recorder, go_on, rows, small_config, start, task_keys, weights
from tests.trainers.trajectories import group, random_conversation
from trainers import loop
from trainers.algorithms.sft import SFT
from trainers.batch import pack
from trainers.gathering import TaskSampler, gather
from trainers.learner import Learner, OptimizerSettings
from trainers.loop import check_device, open_environment, train
from trainers.metrics import rollout_metrics
from trainers.run import Run
from trainers.settings import SettingsError
from trainers.transcripts import read_trajectories


class Scripted(Rollout):
    """A rollout whose groups' rewards are given: one list per task, in the order of asking; None fails, an empty one is
    cancelled."""

    def __init__(self, *batches):
        self.batches, self.asked, self.seeds = list(batches), [], []

    def run(self, agent, tasks, group_size, seed, on_episode=None, wanted=None):
        self.asked.append([task.key for task in tasks])
        self.seeds.append(seed)
        rewards = self.batches.pop(0)
        assert len(rewards) == len(tasks)
        groups = [Group(task=task, trajectories=[
            Trajectory(turns=[Turn(response_ids=np.array([1]))], reward=float(reward), task=task) for reward in group])
            for task, group in zip(tasks, rewards) if group]
        failed = sum(group is None for group in rewards)
        report = RolloutReport(dropped_groups=failed, sampled_tokens=sum(len(g.trajectories) for g in groups))
        report.errors["error_environment:OSError"] += failed
        report.cancelled = [place for place, group in enumerate(rewards) if group == ()]
        if not groups:
            raise RolloutError("all groups failed", report)
        return groups, report


DEAD, LIVE, SLOW = (0, 0), (0, 1), ()


def gathered(rollout, name="DAPO", **algorithm):
    config = small_config(algorithm={"name": name, **algorithm}, rollout={"tasks_per_step": 4, "group_size": 2})
    tasks = TaskSampler(Parity(tasks=100).tasks("train"), seed=0)
    return *gather(config, rollout, None, tasks, step=1), tasks


def test_dead_groups_are_refilled_at_the_rate_kept_so_far():
    # 1 of 4 kept: 3 missing need 12 more, at most 4 at a time. 2 of 8: 2 missing need 8. 5 of 12: enough.
    rollout = Scripted([LIVE, DEAD, DEAD, DEAD], [DEAD, LIVE, DEAD, DEAD], [LIVE, LIVE, LIVE, DEAD])
    kept, report, sampled, tasks = gathered(rollout)
    assert len(kept) == 4 and len(sampled) == 12 and report.sampled_tokens == 24
    assert tasks.position == 12 and len({key for batch in rollout.asked for key in batch}) == 12
    assert len(set(rollout.seeds)) == 3
    # 3 of 4 kept: 1 missing needs 4/3, so 2.
    assert [len(batch) for batch in _asked([LIVE, LIVE, LIVE, DEAD], [DEAD, LIVE])] == [4, 2]
    # None kept: as many as are missing.
    assert [len(batch) for batch in _asked([DEAD] * 4, [LIVE] * 4)] == [4, 4]


def _asked(*batches):
    rollout = Scripted(*batches)
    gathered(rollout)
    return rollout.asked


def test_after_the_last_generation_batch_fewer_groups_are_trained_on():
    kept, _, sampled, _ = gathered(Scripted([LIVE, DEAD, DEAD, DEAD], [DEAD] * 4), max_generation_batches=2)
    assert len(kept) == 1 and len(sampled) == 8


def test_nothing_worth_training_on_is_an_error_that_says_what_to_do():
    with pytest.raises(RolloutError, match=r"none of 8 groups is worth training on for DAPO.*warm_start.steps"):
        gathered(Scripted([DEAD] * 4, [DEAD] * 4), max_generation_batches=2)


def test_tasks_of_cancelled_groups_come_first_in_the_next_batch_and_in_a_checkpoint():
    rollout = Scripted([LIVE, SLOW, LIVE, None], [LIVE, LIVE, SLOW, SLOW])
    config = small_config(rollout={"tasks_per_step": 2, "group_size": 2, "oversampled_tasks": 2})
    tasks = TaskSampler(Parity(tasks=100).tasks("train"), seed=0)
    reports = [gather(config, rollout, None, tasks, step)[1] for step in (1, 2)]
    assert rollout.asked == [[tasks.at(i).key for i in batch] for batch in ([0, 1, 2, 3], [1, 4, 5, 6])]
    assert tasks.progress() == {"task_position": 7, "unfinished_tasks": [5, 6]}
    assert [len(report.cancelled) for report in reports] == [1, 2]


def test_groups_that_failed_are_counted_and_no_reward_is_made_of_them():
    kept, report, sampled, _ = gathered(Scripted([LIVE, None, LIVE, None]), name="GRPO")
    assert len(kept) == len(sampled) == 2 and report.dropped_groups == 2
    assert rollout_metrics(sampled, len(kept), report, 0)["failed_episodes"] == 2
    assert rollout_metrics(sampled, len(kept), report, 0)["reward"] == 0.5


def test_a_refill_that_fails_as_a_whole_does_not_lose_the_groups_kept():
    kept, report, _, _ = gathered(Scripted([LIVE, LIVE, LIVE, DEAD], [None, None], [DEAD, LIVE]))
    assert len(kept) == 4 and report.dropped_groups == 2
    with pytest.raises(RolloutError):
        gathered(Scripted([None] * 4))


def test_tasks_come_once_per_epoch_and_position_alone_says_where():
    tasks = Parity(tasks=5).tasks("train")
    sampler = TaskSampler(tasks, seed=3)
    first = [sampler.at(sampler.draw()).key for _ in range(12)]
    assert all(sorted(first[i:i + 5]) == [task.key for task in tasks] for i in (0, 5))
    for position in range(12):
        other = TaskSampler(tasks, 3, {"task_position": position, "unfinished_tasks": []})
        assert [other.at(other.draw()).key for _ in range(position, 12)] == first[position:]


def test_tasks_that_were_given_back_come_first_and_the_oldest_of_them_at_once():
    sampler = TaskSampler(Parity(tasks=5).tasks("train"), seed=3)
    assert [sampler.draw() for _ in range(4)] == [0, 1, 2, 3]
    sampler.give_back([3, 1])
    progress = sampler.progress(under_way={2})
    assert progress == {"task_position": 4, "unfinished_tasks": [1, 2, 3]}
    resumed = TaskSampler(Parity(tasks=5).tasks("train"), 3, progress)
    assert [sampler.draw() for _ in range(3)] == [1, 3, 4] and [resumed.draw() for _ in range(4)] == [1, 2, 3, 4]
    assert sampler.progress() == resumed.progress() == {"task_position": 5, "unfinished_tasks": []}


def test_dapo_samples_more_than_it_trains_on(tmp_path):
    start(tmp_path, algorithm={"name": "DAPO"}, rollout={"group_size": 2}, run={"steps": 4})
    assert any(row["groups_sampled"] > row["groups_kept"] == 2 for row in rows(tmp_path))
    by_task = {}
    for t in rows(tmp_path, "trajectories"):
        by_task.setdefault((t["step"], t["task"]["key"]), []).append(t["reward"])
    assert all(len(set(rewards)) > 1 for rewards in by_task.values())


def test_an_environment_that_always_fails_ends_the_run_and_makes_no_reward(tmp_path, monkeypatch):
    run = Run.create(tmp_path, small_config(rollout={"retries": 1}))

    class Breaking(Recorder):
        def phase(self, name, total, done=0):
            monkeypatch.setattr(Parity, "_step", _broken)
    with pytest.raises(RolloutError, match=r"(?s)all 2 groups failed.*RuntimeError: the world is gone"):
        train(run, Breaking())
    assert not (tmp_path / "metrics.jsonl").exists() and not run.checkpoints


def _broken(env, action):
    raise RuntimeError("the world is gone")


def test_an_environment_that_fails_later_costs_no_step_that_was_done(tmp_path, monkeypatch):
    sections = {"run": {"steps": 4, "save_every": 0, "log_trajectories": 1000}}
    start(tmp_path / "reference", **sections)

    class Breaking(Recorder):
        def advance(self, metrics):
            super().advance(metrics)
            if self.done == 2:
                monkeypatch.setattr(Parity, "_step", _broken)
    run = Run.create(tmp_path / "broken", small_config(**sections))
    with pytest.raises(RolloutError):
        train(run, Breaking())
    monkeypatch.undo()
    assert [path.name for path in run.checkpoints] == ["step-000002"]
    go_on(run.folder)
    assert rows(run.folder) == rows(tmp_path / "reference")
    assert torch.equal(weights(run.folder), weights(tmp_path / "reference"))


def test_a_policy_that_always_succeeds_is_kept_where_nothing_is_left_to_learn(tmp_path, monkeypatch):
    class Solved(Recorder):
        def advance(self, metrics):
            super().advance(metrics)
            if self.done == 2:
                monkeypatch.setattr(Parity, "_step", lambda env, action: envs.Outcome(
                    reward=1.0, terminated=True, success=True))
    run = Run.create(tmp_path, small_config(algorithm={"name": "DAPO"}, run={"steps": 5}))
    with pytest.raises(RolloutError, match="none of 20 groups is worth training on for DAPO"):  # 10 batches of 2
        train(run, Solved())
    assert [path.name for path in run.checkpoints] == ["step-000002"]


def test_one_task_that_always_fails_is_left_out_and_counted(tmp_path, monkeypatch):
    whole = Parity._step

    def step(env, action):
        if env.task.key == "train 3" and not action.startswith("gold"):
            raise OSError("no such world")
        return whole(env, action)
    monkeypatch.setattr(Parity, "_step", step)
    start(tmp_path, rollout={"retries": 1, "tasks_per_step": 5})
    assert sum(row["dropped_groups"] for row in rows(tmp_path)) == 1  # ten tasks in two steps
    assert {key for _, key in task_keys(tmp_path)} == {f"train {i}" for i in range(10)} - {"train 3"}
    assert sum(row["groups_kept"] for row in rows(tmp_path)) == 9


@pytest.mark.parametrize("sections", [
    {"algorithm": {"name": "RLOO"}}, {"algorithm": {"name": "RLOOpp"}}, {"algorithm": {"statistics_over": "row"}},
    {"rollout": {"window": 1}}, {"algorithm": {"name": "tests.trainers.test_loop:Signs"}},
    {"environment": {"options": {"turns": 1}}}])
def test_two_steps_of_everything_change_the_weights(sections, tmp_path):
    start(tmp_path, **sections)
    assert len(rows(tmp_path)) == 2 and sum(row["gradient_norm"] for row in rows(tmp_path)) > 0
    before = torch.cat([p.flatten() for _, p in sorted(
        load_policy(str(tmp_path / "initial"), device="cpu").model.named_parameters())])
    assert not torch.equal(weights(tmp_path), before)


def test_a_smaller_last_minibatch_weighs_its_own_rows():
    policy, rng = random_policy(), np.random.default_rng(0)
    trainer = Learner(policy, SFT(aggregation="sequence_mean_token_mean"), OptimizerSettings())
    seven = group(*(random_conversation(rng, turns=2, reward=1.0) for _ in range(7)))
    batch = pack([seven], trainer.algorithm.advantages([seven]))

    def gradient(part):
        trainer.optimizers[0].zero_grad()
        trainer.accumulate_gradients(part)
        return torch.cat([p.grad.flatten() for p in trainer.parameters])
    parts = list(batch.minibatches(2, rng))
    for part, size in zip(parts, (4, 3), strict=True):
        members = np.unique(part.trajectory_index)
        assert len(members) == size
        alone = [gradient(batch.select([member])) for member in members]
        torch.testing.assert_close(gradient(part), torch.stack(alone).mean(0), rtol=1e-4, atol=1e-6)


class Signs(loop.TrainConfig().algorithm.__class__):
    """A user's algorithm: only the sign of GRPO's advantage counts."""

    def advantages(self, groups, scores=None, step=0):
        return self.credits(groups, [np.sign(group.rewards - group.rewards.mean()) for group in groups])


@pytest.mark.parametrize("env, options", [
    ("turngym/Math-v0", {}), ("turngym/Countdown-v0", {"max_numbers": 3, "largest_number": 30, "tool_rounds": 2})])
def test_the_built_in_environments_train(env, options, tmp_path):
    start(tmp_path, environment={"id": env, "options": options, "tasks": 4}, warm_start={"steps": 2, "batch_size": 2},
          evaluation={"episodes": 2}, model={"vocabulary": 400})
    assert len(rows(tmp_path)) == 2 and [row["step"] for row in rows(tmp_path, "evaluations")] == [0, 2]


def test_logged_trajectories_read_back_with_their_step(tmp_path):
    start(tmp_path, run={"steps": 2, "log_trajectories": 3})
    lines = (tmp_path / "trajectories.jsonl").read_text(encoding="utf-8").splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 1, 1, 2, 2, 2]
    for trajectory in read_trajectories(tmp_path / "trajectories.jsonl"):
        assert trajectory.task.env_id == "test/Parity-v0" and trajectory.system_prompt == ""
        assert all(turn.weight_version in (0, 1) and len(turn.response_ids) for turn in trajectory.turns)


def test_the_panel_is_played_by_the_weights_of_its_step(tmp_path, monkeypatch):
    versions = []
    whole = ModelAgent.start

    def watched(agent, env, observation, seed):
        versions.append((env.task.split, agent.engine.weight_version, agent.temperature))
        return whole(agent, env, observation, seed)
    monkeypatch.setattr(ModelAgent, "start", watched)
    start(tmp_path, evaluation={"episodes": 1, "temperature": 0.0})
    assert list(dict.fromkeys(versions)) == [("heldout", 0, 0.0), ("train", 0, 1.0), ("train", 1, 1.0),
                                             ("heldout", 2, 0.0)]


def test_every_environment_that_was_played_is_closed(tmp_path, monkeypatch):
    made, closed = set(), set()
    monkeypatch.setattr(Parity, "close", lambda env: closed.add(env))
    whole = Parity._reset
    monkeypatch.setattr(Parity, "_reset", lambda env, task, rng: made.add(env) or whole(env, task, rng))
    start(tmp_path, evaluation={"episodes": 2}, warm_start={"steps": 2})
    assert made and made <= closed


@pytest.mark.parametrize("sections, message", [
    ({"environment": {"id": "test/Prity-v0"}}, "environment test/Prity-v0: .*Parity"),
    ({"environment": {"id": "no_such:test/Parity-v0"}}, "no_such"),
    ({"environment": {"options": {"trns": 1}}}, "environment test/Parity-v0: .*trns"),
    ({"environment": {"tasks": 51}}, "holds 50 problems"), ({"environment": {"options": {"turns": 0}}}, "max_turns"),
    ({"environment": {"options": {"tasks": 0}, "tasks": 1}}, "holds no problem"),
    ({"environment": {"id": "turngym/Countdown-v0", "split": "validation"}}, "no split 'validation'"),
    ({"evaluation": {"episodes": 51}}, "evaluation.episodes of test/Parity-v0: .*holds 50 problems")])
def test_an_environment_that_is_not_there_is_named(sections, message):
    with pytest.raises(SettingsError, match=message):
        open_environment(small_config(**sections))


def test_a_split_without_tasks_is_an_error(monkeypatch):
    monkeypatch.setattr(Parity, "tasks", lambda env, split: [])
    with pytest.raises(SettingsError, match="'nothing' holds no task to train on"):
        config = small_config(environment={"split": "nothing"})
        object.__setattr__(config.environment, "tasks", None)
        open_environment(config)


@pytest.mark.parametrize("device", ["cuda:99", "meta"])
def test_a_device_that_is_not_there_is_named(device):
    with pytest.raises(SettingsError, match=f"model.device '{device}' is not on this machine"):
        check_device(small_config(model={"device": device}))
    check_device(small_config(model={"device": "cpu"}))


def test_a_tiny_policy_needs_gold_solutions(tmp_path, monkeypatch):
    monkeypatch.delattr(Parity, "gold")
    with pytest.raises(SettingsError, match=r"Parity has no gold solution.*write gold.., or name a model"):
        start(tmp_path)


def test_prompts_that_leave_no_room_are_an_error(tmp_path):
    with pytest.raises(RolloutError, match="no episode has room for a response"):
        start(tmp_path, rollout={"max_context_tokens": 3})
