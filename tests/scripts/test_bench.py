"""`scripts.bench` measures all that there is, and says why it skips something."""

import json
import sys
from importlib.util import find_spec

import numpy as np
import pytest

import envs
import envs.countdown
import trainers.algorithms
from agents.scoring import score_sequences
from agents.tiny import make_tiny_policy
from scripts import bench
from scripts._bench import instances, profile, rollout, training
from trainers.algorithms import Algorithm


def measure(tmp_path, *arguments):
    assert bench.main([*arguments, "--quick", "--out", str(tmp_path / "f.json")]) == 0
    return json.loads((tmp_path / "f.json").read_text())


def tiny():
    return make_tiny_policy(envs.make("turngym/Countdown-v0"), ["1 2 3"], vocabulary=300, hidden_size=32, layers=1)


def test_the_credit_of_every_algorithm_is_timed(tmp_path, capsys):
    found = measure(tmp_path, "credit")
    kinds = {name for name in trainers.algorithms.__all__ if isinstance(getattr(trainers.algorithms, name), type)
             and issubclass(getattr(trainers.algorithms, name), Algorithm)}
    assert found["algorithms"].keys() == kinds - {"Algorithm"} >= {"GRPO", "GiGPO", "PlanPO", "STAMP", "FACTOR", "PPO"}
    shown = capsys.readouterr().out
    for name, row in found["algorithms"].items():
        assert 0 < row["low"] <= row["seconds"] <= row["high"] and name in shown
        assert row["share"] == pytest.approx(row["seconds"] / found["update_seconds"])


def test_log_probabilities_take_a_tenth_of_the_memory_of_full_logits_and_have_their_gradients(tmp_path, capsys):
    found = measure(tmp_path, "logprobs")
    assert found["full_logits_bytes"] == 8192 * 16_000 * 4
    assert 0 < found["peak_bytes"] <= 0.1 * found["full_logits_bytes"]
    assert found["difference"] < 1e-5
    assert "full logits" in capsys.readouterr().out


def test_credit_is_compared_with_the_update_of_a_given_model(tmp_path):
    tiny().save(tmp_path / "model")
    assert measure(tmp_path, "credit", "--model", str(tmp_path / "model"))["update_seconds"] > 0


def test_a_model_that_is_not_there_ends_with_1(capsys):
    assert bench.main(["credit", "--quick", "--model", "./no/such/model"]) == 1
    assert "no model folder" in capsys.readouterr().err


def test_no_token_is_sampled_for_an_episode_that_is_over_and_keeping_changes_none(tmp_path, capsys):
    found = measure(tmp_path, "rollout")
    assert found["skewed"]["asynchronous"]["wasted_tokens"] == 0
    for name in ("asynchronous", "lock_step"):
        assert 0 <= found["skewed"][name]["engine_idle"] < 1
    kept = found["kept"]
    # 2 episodes, prompts of 16, 28 and 40 tokens. Re-prefilling reads all 2 x 84; keeping reads the first 16, then the
    # 8 of each observation and the last of the response, which was sampled but not read.
    assert kept["same_tokens"] and kept["re_prefilling"]["prefilled_tokens"] == 168
    assert kept["keeping"]["prefilled_tokens"] == 2 * (16 + 2 * 9)
    assert found["scheduled"]["seconds_per_turn"] > 0
    shown = capsys.readouterr().out
    assert "engine idle" in shown and "scheduler time per turn" in shown


def test_environments_are_measured_in_one_and_two_processes_or_skipped_with_a_reason(tmp_path, capsys):
    found = measure(tmp_path, "envs", "--env", "turngym/Countdown-v0", "--env", "turngym/Missing-v0")
    countdown = found["turngym/Countdown-v0"]
    assert [(row["instances"], row["processes"]) for row in countdown["rows"]] == [(1, 1), (2, 1), (2, 2)]
    assert all(row["steps_per_second"] > 0 and row["memory"] > 1e6 for row in countdown["rows"])
    assert "Missing" in found["turngym/Missing-v0"]["skipped"]
    assert "skipped: NameNotFound" in capsys.readouterr().out


def test_every_built_in_environment_is_registered_for_the_table():
    assert {"turngym/Countdown-v0", "turngym/Search-v0"} <= set(bench.environments.registered())


def test_walks_are_played_again_as_they_were_recorded():
    walks = instances.record("turngym/Countdown-v0", 2, 5, seconds=60)
    assert len(walks) == 2 and all(1 <= len(walk["actions"]) <= 5 for walk in walks)
    players = [instances.Player("turngym/Countdown-v0", walks, i) for i in range(3)]
    assert [player.env.task.key for player in players] == [walks[0]["key"], walks[1]["key"], walks[0]["key"]]
    found = instances.play(players, seconds=0)
    assert found["steps"] == 3 and found["seconds"] > 0


@pytest.mark.skipif(find_spec("alfworld") is None, reason="needs the extra alfworld")
def test_an_engine_is_measured_on_the_environments_own_actions():
    walks = instances.record("turngym/ALFWorld-v0", 1, 5, seconds=0)
    found = instances.beside_engine("turngym/ALFWorld-v0", walks, 0, seconds=0)
    assert found["env"] > 0 and found["engine"] > 0


def test_a_slow_environment_answers_and_ends_at_its_limit():
    env = rollout.Slow(max_turns=2)
    env.reset(options={"task": rollout.Task(key="0", data={"latency": 0.0})})
    assert env.step("a")[3] is False and env.step("b")[3] is True


@pytest.mark.parametrize("arguments", [[], ["trian"], ["envs", "--out", "no/such/folder/f.json"],
                                       ["credit", "--step-seconds", "1"]])
def test_wrong_arguments_end_with_2(arguments, capsys):
    with pytest.raises(SystemExit) as exit:
        bench.main(arguments)
    assert exit.value.code == 2


def test_a_whole_training_step_is_measured_and_its_time_accounted_for(tmp_path, capsys):
    found = measure(tmp_path, "train", "--profile")
    run, = found["sides"]["turngym"]
    assert run["seconds"] >= run["rollout_seconds"] > 0 and run["sampled_tokens"] > 0 and run["peak"] > run["used"] > 0
    assert sum(row["share"] for row in found["profile"]) == pytest.approx(1)
    assert {"rollout", "update"} <= {row["phase"] for row in found["profile"]}
    assert found["ratios"] == {} and "where turngym's step goes" in capsys.readouterr().out


@pytest.mark.skipif(find_spec("trl") is not None, reason="TRL is installed here")
def test_a_trl_that_is_not_there_is_said(capsys):
    assert bench.main(["train", "--quick", "--trl-python", sys.executable]) == 1
    error = capsys.readouterr().err
    assert "the step of TRL failed" in error and "No module named 'trl'" in error


def test_ratios_are_those_of_runs_side_by_side():
    def run(seconds, tokens, peak, used):
        return {"seconds": seconds, "tokens_per_second": tokens / seconds, "peak": peak, "used": used}

    found = training._ratios({"turngym": [run(2.0, 100, 10, 5), run(1.0, 100, 10, 4)],
                              "TRL": [run(6.0, 150, 20, 15), run(4.0, 100, 30, 20)]})
    assert found == {"seconds": [3.0, 4.0], "seconds per sampled token": [2.0, 4.0], "peak memory": [2.0, 3.0],
                     "peak memory less imports": [3.0, 5.0]}


def test_time_is_the_environments_the_models_or_that_of_the_function_it_is_spent_in(monkeypatch):
    places = []

    def look(*arguments):
        places.append(profile.place(sys._getframe()))

    policy = tiny()
    policy.model.model.layers[0].register_forward_hook(look)
    score_sequences(policy.model, [np.arange(5, 10)])
    monkeypatch.setattr(envs.countdown, "last_block", look)
    env = envs.make("turngym/Countdown-v0")
    env.reset(seed=0)
    env.step("<tool>1</tool>")
    look()
    here = "tests/scripts/test_bench.py: look"
    assert [what for _, what in places] == ["model arithmetic", "environment", here]
