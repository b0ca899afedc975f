"""An evaluation counts what happened on its panel, says how sure it is, and leaves no trace."""

import json
import random
from dataclasses import replace

import gymnasium
import numpy as np
import pytest
import torch
from rich.console import Console

import envs
from agents.agent import ModelAgent, ScriptedAgent
from agents.rollout import Rollout, RolloutError
from agents.tiny import make_tiny_policy
from agents.trajectory import Group, Status, Trajectory, Turn
from agents.transformers_engine import TransformersEngine
from envs.core import Task, panel_sha256
from rewards import score_countdown
from trainers import statistics
from trainers.evaluation import evaluate, pass_at_k, play, select_panel, summarise, table
from trainers.statistics import bootstrap_interval, wilson_interval
from trainers.supervised import gold_texts

ID = "turngym/Countdown-v0"


class Shaky(envs.SingleTurnEnv):
    """Three problems with one prompt text; the second one breaks or cannot be graded, as `fault` says."""

    def __init__(self, fault: str = ""):
        super().__init__()
        self.fault = fault

    def tasks(self, split):
        return [Task(key=str(i), data={"question": "Same?"}, family="[bold]odd" if i else "even") for i in range(3)]

    def gold(self, rng):
        return ["yes"]

    def score(self, task, answer):
        if task.key == "1" and self.fault == "raises":
            raise OSError("disk gone")
        return None if task.key == "1" and self.fault == "ungraded" else float(answer == "yes")


gymnasium.register("test/Shaky-v0", entry_point=Shaky)


def rollout(env_id=ID, **options):
    return Rollout(lambda: envs.make(env_id, **options))


@pytest.fixture(scope="module")
def panel():
    return select_panel(envs.make(ID), "heldout", 12)


@pytest.fixture(scope="module")
def policy():
    env = envs.make(ID, tool=False)
    return make_tiny_policy(env, gold_texts(env, env.tasks("heldout")[:20], 0), hidden_size=32, layers=2)


def model_agent(policy, temperature=1.0, engine=None):
    return ModelAgent(engine or TransformersEngine(policy, slots=16), policy, temperature=temperature,
                      max_response_tokens=10)


def hand_made(*outcomes, families=None):
    """Groups whose problems succeed as the rows of `outcomes` say."""
    groups = []
    for i, row in enumerate(outcomes):
        task = Task(key=f"k{i}", split="s", env_id="e", family=families[i] if families else "")
        groups.append(Group(task=task, trajectories=[
            Trajectory(turns=(), reward=None if won is None else float(won), success=bool(won), score=float(won or 0))
            for won in row]))
    return groups


def summary(*outcomes, families=None):
    groups = hand_made(*outcomes, families=families)
    report = type("Report", (), {"errors": {}})
    return summarise([g.task for g in groups], groups, report, samples=len(outcomes[0]), seed=0)


@pytest.mark.parametrize("kind, right", [("gold", 1.0), ("noop", 0.0)])
def test_gold_solves_everything_and_silence_nothing(panel, kind, right):
    found = evaluate(rollout(), ScriptedAgent(kind), panel)
    assert (found.success_rate, found.score, found.n, found.problems) == (right, right, 12, 12)
    assert (found.ci_low, found.ci_high) == wilson_interval(int(12 * right), 12) and found.interval == "wilson"
    assert found.invalid == 1 - right and found.truncated == 1 - right and found.turns == (2 if right else 11)


def test_the_panel_is_the_first_of_the_split_in_order(panel):
    tasks = envs.make(ID).tasks("heldout")
    assert [task.key for task in panel] == [task.key for task in tasks[:12]]
    assert {(task.env_id, task.split) for task in panel} == {(ID, "heldout")}
    assert len(select_panel(envs.make(ID), "train", 3)) == 3


# 50 is the size of Countdown's public test; one more is not there, and none is no panel.
@pytest.mark.parametrize("episodes", [51, 0, -1])
def test_a_panel_larger_than_the_split_is_refused(episodes):
    with pytest.raises(ValueError, match="'test' of turngym/Countdown-v0 holds 50"):
        select_panel(envs.make(ID), "test", episodes)


@pytest.mark.parametrize("episodes", [1, 0])
def test_a_split_without_problems_is_named(episodes):
    class Empty(envs.TextEnv):
        def tasks(self, split):
            return []
    with pytest.raises(ValueError, match=r"split 'train' of .* holds no problem"):
        select_panel(Empty(), "train", episodes)


def test_the_panels_hash_names_its_problems_in_order(panel):
    found = evaluate(rollout(), ScriptedAgent("noop"), panel)
    # As it was on the first machine: sha256 of the 12 keys joined by newlines. Another value means other problems.
    assert found.panel_sha256 == "b22553d4fb2f402a7050d0dbfdd04677481e2c4722466eab59b471e238d47050"
    assert found.panel_sha256 == panel_sha256(panel) == \
        evaluate(rollout(), ScriptedAgent("gold"), panel, samples=2, seed=5).panel_sha256
    assert panel_sha256(panel[::-1]) != panel_sha256(panel) != panel_sha256(panel[:-1])


def test_every_problem_is_played_exactly_as_often_as_asked(panel):
    groups, _ = play(rollout(), ScriptedAgent("noop"), panel, samples=3, seed=0)
    assert [group.task.key for group in groups] == [task.key for task in panel]
    assert all(len(group.trajectories) == 3 for group in groups)


def test_two_problems_with_one_text_are_two_problems():
    found = evaluate(rollout("test/Shaky-v0"), ScriptedAgent("gold"), envs.make("test/Shaky-v0").tasks("train"))
    assert (found.n, found.problems, found.successes) == (3, 3, 3)
    # [1, 0] and [1, 1]: mean@2 is 3/4 over two problems and pass@2 is 1; there are no four samples of one problem.
    found = summary([1, 0], [1, 1])
    assert (found.problems, found.n, found.success_rate) == (2, 4, 0.75)
    assert {k: rate.success_rate for k, rate in found.pass_at_k.items()} == {1: 0.75, 2: 1.0}


def test_pass_at_k_is_given_for_powers_of_two_up_to_the_samples():
    for samples, ks in [(1, [1]), (2, [1, 2]), (5, [1, 2, 4]), (8, [1, 2, 4, 8])]:
        assert list(summary([1] * samples, [0] * samples).pass_at_k) == ks
    # 2 of 5 right and 1 of 5: 1 − C(3,4)/C(5,4) = 1 and 1 − C(4,4)/C(5,4) = 4/5.
    assert summary([1, 1, 0, 0, 0], [0, 0, 1, 0, 0]).pass_at_k[4].success_rate == pytest.approx(0.9)


def test_one_greedy_sample_says_nothing_of_pass_at_10():
    # 40 of 160 solved; the misuse 1 − C(120,10)/C(160,10) would give .949.
    found = summary(*([[1]] * 40 + [[0]] * 120))
    assert found.success_rate == 0.25 and list(found.pass_at_k) == [1]
    assert pass_at_k is statistics.pass_at_k
    with pytest.raises(ValueError):
        pass_at_k(1, 1, 10)


def test_several_samples_are_no_more_problems():
    rows = [[1, 1, 1, 0], [0, 0, 0, 0], [1, 0, 0, 0], [1, 1, 1, 1], [0, 1, 0, 0]]
    found = summary(*rows)
    assert (found.ci_low, found.ci_high) == bootstrap_interval([np.mean(row) for row in rows])
    assert found.interval == "bootstrap" and found.ci_high - found.ci_low > 0.4  # Wilson's for 9 of 20 is .40 wide
    low, high = bootstrap_interval([statistics.pass_at_k(4, sum(row), 2) for row in rows])
    assert (found.pass_at_k[2].ci_low, found.pass_at_k[2].ci_high) == (low, high)


@pytest.mark.parametrize("won", [0, 1])
def test_problems_that_all_fare_alike_prove_no_certainty(won):
    found = summary(*[[won] * 4] * 10)
    assert (found.ci_low, found.ci_high) == wilson_interval(10 * won, 10) and found.interval == "wilson"
    half = summary(*[[1, 0]] * 10)
    assert half.ci_low < 0.3 and half.ci_high > 0.7


def test_families_add_up():
    found = summary([1], [0], [1], [1], families=["cool", "heat", "heat", "heat"])
    assert {name: (rate.n, rate.success_rate) for name, rate in found.families.items()} == \
        {"cool": (1, 1.0), "heat": (3, pytest.approx(2 / 3))}
    assert (found.families["heat"].ci_low, found.families["heat"].ci_high) == wilson_interval(2, 3)
    assert sum(rate.n * rate.success_rate for rate in found.families.values()) == pytest.approx(found.successes)


def test_shares_are_of_turns_and_episodes():
    turns = [Turn(response_ids=[1, 2, 3], valid=False), Turn(response_ids=[4], finish_reason="length")]
    episodes = [Trajectory(turns=turns, reward=0.0), Trajectory(turns=turns[:1], reward=1.0, success=True, score=1.0),
                Trajectory(turns=turns[:1], reward=0.5, score=0.5, status=Status.TRUNCATED_TURNS)]
    groups = [Group(trajectories=[episode]) for episode in episodes]
    found = summarise([Task(key="k")] * 3, groups, type("Report", (), {"errors": {}}), samples=1, seed=0)
    assert (found.turns, found.tokens, found.invalid) == (4 / 3, 10 / 3, 3 / 4)
    assert (found.truncated, found.score, found.success_rate) == (2 / 3, 0.5, 1 / 3)


@pytest.mark.parametrize("fault, dropped, unscorable", [("raises", 1, 0), ("ungraded", 0, 1)])
def test_what_cannot_be_judged_is_no_failure(fault, dropped, unscorable):
    env = envs.make("test/Shaky-v0", fault=fault)
    found = evaluate(rollout("test/Shaky-v0", fault=fault), ScriptedAgent("gold"), env.tasks("train"), samples=2)
    assert (found.dropped, found.unscorable, found.problems, found.n) == (dropped, unscorable, 2, 4)
    assert found.success_rate == 1.0
    assert sum(found.errors.values()) >= dropped and all("OSError" in name for name in found.errors)
    assert found.panel_sha256 == panel_sha256(env.tasks("train")), "the hash is of the problems asked for"


@pytest.mark.parametrize("fault", ["raises", "ungraded"])
def test_nothing_that_can_be_judged_is_an_error(fault):
    tasks = envs.make("test/Shaky-v0").tasks("train")[1:2]
    with pytest.raises(RolloutError, match="disk gone" if fault == "raises" else "none of the 1 problems"):
        evaluate(rollout("test/Shaky-v0", fault=fault), ScriptedAgent("gold"), tasks)


@pytest.mark.parametrize("tasks, samples", [([], 1), (None, 0), (None, -1)])
def test_nothing_to_play_is_an_error(panel, tasks, samples):
    with pytest.raises(ValueError, match="nothing to evaluate"):
        evaluate(rollout(), ScriptedAgent("noop"), panel if tasks is None else tasks, samples=samples)


def responses(policy, panel, **options):
    temperature = options.pop("temperature", 1.0)
    groups, _ = play(rollout(tool=False), model_agent(policy, temperature), panel[:4], **options)
    return [[tuple(turn.response_ids) for t in group.trajectories for turn in t.turns] for group in groups]


def test_greedy_samples_are_equal_and_heated_ones_are_not(policy, panel):
    greedy = responses(policy, panel, samples=3, seed=0, temperature=0.0)
    assert all(len(set(row)) == 1 for row in greedy)
    assert greedy == responses(policy, panel, samples=3, seed=1, temperature=0.0)
    heated = responses(policy, panel, samples=3, seed=0)
    assert all(len(set(row)) == 3 for row in heated)
    assert heated == responses(policy, panel, samples=3, seed=0) != responses(policy, panel, samples=3, seed=1)


def test_the_same_seed_gives_the_same_evaluation(policy, panel):
    def run(seed):
        return evaluate(rollout(tool=False), model_agent(policy), panel, samples=2, seed=seed)
    assert run(3) == run(3) != replace(run(4), seed=3)


def test_an_evaluation_leaves_no_trace(policy, panel):
    def sample_beside(evaluations):
        engine = TransformersEngine(policy, slots=16)
        training = model_agent(policy, engine=engine)
        runs = []
        for step in range(3):
            groups, _ = rollout(tool_rounds=2).run(training, panel[:4], 2, seed=step)
            runs += [(turn.response_ids.tobytes(), turn.logprobs.tobytes(), turn.weight_version)
                     for group in groups for t in group.trajectories for turn in t.turns]
            engine.load({}, step + 1)
            for _ in range(evaluations):
                evaluate(rollout(tool_rounds=2), model_agent(policy, 0.5, engine), panel[:5], seed=9)
        return runs

    def state():
        return (torch.get_rng_state().tolist(), random.getstate(), np.random.get_state()[1].tolist(),
                policy.model.training, [p.grad is None for p in policy.model.parameters()])

    weights, before = {k: v.clone() for k, v in policy.model.state_dict().items()}, state()
    assert sample_beside(0) == sample_beside(1) == sample_beside(2)
    assert state() == before
    assert all(torch.equal(weights[name], value) for name, value in policy.model.state_dict().items())


def test_a_model_in_training_mode_stays_in_it(policy, panel):
    policy.model.train()
    try:
        evaluate(rollout(tool=False), model_agent(policy), panel[:2])
        assert policy.model.training
    finally:
        policy.model.eval()


def test_the_numbers_are_those_of_the_episodes(policy, panel):
    groups, report = play(rollout(tool=False), ScriptedAgent("random"), panel, samples=4, seed=2)
    found = summarise(panel, groups, report, samples=4, seed=2)
    right = [score_countdown(g.task.data["numbers"], g.task.data["target"], t.turns[0].text)
             for g in groups for t in g.trajectories]
    assert found.successes == sum(right) and found.success_rate == np.mean(right)


def test_the_json_is_strict_and_holds_the_promised_keys(panel):
    found = evaluate(rollout(), ScriptedAgent("random"), panel, samples=2)
    plain = json.loads(json.dumps(found.to_json(), allow_nan=False))
    assert {"env", "split", "n", "success_rate", "ci_low", "ci_high", "score", "families", "panel_sha256",
            "versions"} <= plain.keys()
    assert plain["env"] == ID and plain["split"] == "heldout" and plain["pass_at_k"].keys() == {"1", "2"}
    assert plain["versions"].keys() == {"python", "torch", "transformers", "turngym", "gymnasium"}
    assert plain["families"]["3 numbers"].keys() == {"n", "success_rate", "ci_low", "ci_high", "interval"}


def test_the_table_is_plain_where_nobody_watches(panel, capsys):
    found = summary([1, 0], [1, 1], families=["[bold]odd", "even"])
    Console(width=80).print(table({"[red]mine": found, "gold": found}))
    found.print(Console(width=80), "titled")
    shown = capsys.readouterr().out
    for text in ("[red]mine", "[bold]odd", "75.0%", "pass@2", "100.0%", "titled"):
        assert text in shown
    assert "\x1b" not in shown and "…" not in shown
