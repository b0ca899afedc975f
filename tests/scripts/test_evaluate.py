"""`scripts.evaluate` prints and writes what an agent did, and says what is wrong with its arguments."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

import envs
from agents.tiny import make_tiny_policy
from envs.countdown import Countdown
from scripts import evaluate
from trainers.evaluation import select_panel
from trainers.supervised import gold_texts
from trainers.transcripts import read_trajectories

ROOT = Path(__file__).resolve().parents[2]
COUNTDOWN = ["--env", "turngym/Countdown-v0"]
ANSWER_ONLY = [*COUNTDOWN, "--option", "tool=false"]

GUESS = '''
import gymnasium
import envs


class Guess(envs.SingleTurnEnv):
    system_prompt = "Guess."

    def __init__(self, secret="7"):
        super().__init__()
        self.secret = str(secret)

    def tasks(self, split):
        return [envs.Task(key=str(i), data={"question": "?"}) for i in range(5)]

    def score(self, task, answer):
        return float(answer == self.secret)

    def random_action(self, rng):
        return str(rng.integers(10))


gymnasium.register("me/Guess-v0", entry_point="guess_env:Guess")
'''


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """The folder of an untrained policy."""
    env = envs.make("turngym/Countdown-v0", tool=False)
    folder = tmp_path_factory.mktemp("model")
    make_tiny_policy(env, gold_texts(env, env.tasks("heldout")[:20], 0), hidden_size=32, layers=2).save(folder)
    return str(folder)


def numbers(arguments, path):
    """What the script wrote."""
    assert evaluate.main([*arguments, "--out", str(path)]) == 0
    return json.loads(path.read_text(encoding="utf-8"), parse_constant=pytest.fail)


@pytest.mark.parametrize("agent, low, high", [("gold", 1.0, 1.0), ("noop", 0.0, 0.0), ("random", 0.0, 0.3)])
def test_scripted_agents_are_the_references(agent, low, high, tmp_path, capsys):
    found = numbers([*COUNTDOWN, "--agent", agent, "--split", "test", "--episodes", "50", "--seed", "1"],
                    tmp_path / "f.json")
    assert low <= found["success_rate"] <= high and found["n"] == 50 and found["agent"] == agent
    assert (found["env"], found["split"], found["seed"]) == ("turngym/Countdown-v0", "test", 1)
    assert "\x1b" not in (shown := capsys.readouterr()).out and agent in shown.out and shown.err == ""
    assert list(tmp_path.iterdir()) == [tmp_path / "f.json"]


def test_references_are_rows_beside_the_agent(model, tmp_path, capsys):
    found = numbers([*ANSWER_ONLY, "--agent", "model", "--model", model, "--episodes", "6", "--references",
                     "--max-response-tokens", "6"], tmp_path / "f.json")
    assert {kind: one["success_rate"] for kind, one in found["references"].items() if kind != "random"} == \
        {"gold": 1.0, "noop": 0.0}
    assert len({one["panel_sha256"] for one in [found, *found["references"].values()]}) == 1
    assert (found["model"], found["temperature"], found["max_response_tokens"]) == (model, 0.0, 6)
    assert 0 < found["tokens"] <= 6 and found["references"]["gold"]["tokens"] == 0
    shown = capsys.readouterr().out
    assert [line.split()[0] for line in shown.splitlines() if not line.startswith(" ")] == \
        ["model", "gold", "random", "noop"]


def test_the_same_seed_gives_the_same_file_and_another_seed_another(model, tmp_path):
    def run(seed, name):
        path = tmp_path / name
        assert evaluate.main([*ANSWER_ONLY, "--agent", "model", "--model", model, "--episodes", "4", "--samples", "2",
                              "--seed", seed, "--max-response-tokens", "6", "--trajectories", str(path)]) == 0
        return path.read_bytes()
    assert run("0", "a") == run("0", "b") != run("1", "c")


def test_one_sample_is_greedy_and_several_are_not_unless_asked(model, tmp_path):
    def texts(*arguments):
        path = tmp_path / "t.jsonl"
        evaluate.main([*ANSWER_ONLY, "--agent", "model", "--model", model, "--episodes", "3",
                       "--max-response-tokens", "6", "--trajectories", str(path), *arguments])
        return [t.turns[0].text for t in read_trajectories(path)]
    assert texts("--seed", "0") == texts("--seed", "1")
    assert len(set(texts("--samples", "3"))) > 3
    assert texts("--samples", "3", "--temperature", "0") == list(np.repeat(texts(), 3))


def test_the_episodes_are_written_in_the_panels_order(tmp_path):
    path = tmp_path / "t.jsonl"
    assert evaluate.main([*COUNTDOWN, "--agent", "gold", "--episodes", "5", "--samples", "2", "--trajectories",
                          str(path)]) == 0
    panel = select_panel(envs.make("turngym/Countdown-v0"), "heldout", 5)
    assert [t.task for t in read_trajectories(path)] == [task for task in panel for _ in range(2)]


@pytest.mark.parametrize("arguments, message", [
    (["--env", "turngym/Cuntdown-v0", "--agent", "gold"], "Did you mean: `Countdown`"),
    (["--env", "no_such_module:x/Y-v0", "--agent", "gold"], "no_such_module"),
    ([*COUNTDOWN, "--agent", "gold", "--split", "validation"], "'heldout'"),
    ([*COUNTDOWN, "--agent", "gold", "--split", "test", "--episodes", "51"], "holds 50 problems"),
    ([*COUNTDOWN, "--agent", "gold", "--episodes", "0"], "holds 1,024 problems"),
    ([*COUNTDOWN, "--agent", "gold", "--option", "tol=false"], "tol"),
    (["--env", "turngym/Math-v0", "--option", "data=no_such.jsonl", "--agent", "gold"], "no_such.jsonl"),
    ([*COUNTDOWN, "--agent", "model", "--model", "/no/such/folder"], "no model folder /no/such/folder"),
    ([*COUNTDOWN, "--agent", "model", "--model", "missing.gguf"], "no GGUF file missing.gguf"),
    ([*COUNTDOWN, "--agent", "model", "--model", str(ROOT / "docs")], "cannot load the model")])
def test_what_does_not_exist_is_named(arguments, message, capsys):
    assert evaluate.main(arguments) == 2
    shown = capsys.readouterr()
    assert message in " ".join(shown.err.split()) and "Traceback" not in shown.err and shown.out == ""


@pytest.mark.parametrize("arguments, message", [
    (["--agent", "gold", "--engine", "sglang"], "choose from 'transformers'"),
    (["--agent", "gold", "--engine", "vllm"], "--engine vllm is for --agent model"),
    (["--agent", "model", "--model", "m", "--vllm-python", "p"], "are for a vLLM server that is started here"),
    (["--agent", "gold", "--engine", "openai", "--base-url", "http://h/v1"], "--engine openai is for --agent model"),
    (["--agent", "model", "--model", "m", "--engine", "openai"], "--engine openai needs --base-url URL"),
    (["--agent", "model", "--model", "m", "--base-url", "http://h/v1"], "--base-url is for --engine openai"),
    (["--agent", "gold", "--concurrency", "0"], "--concurrency must be at least 1"),
    (["--agent", "model"], "--model PATH"), (["--agent", "gold", "--model", "x"], "--model PATH"),
    (["--agent", "gold", "--samples", "0"], "--samples must be at least 1"),
    (["--agent", "gold", "--temperature", "-1"], "--temperature must be at least 0"),
    (["--agent", "gold", "--temperature", "nan"], "--temperature must be at least 0"),
    (["--agent", "gold", "--window", "0"], "--window must be at least 1"),
    (["--agent", "gold", "--episode-seconds", "0"], "--episode-seconds must be positive"),
    (["--agent", "gold", "--episode-seconds", "nan"], "--episode-seconds must be positive"),
    (["--agent", "gold", "--episode-seconds", "inf"], "--episode-seconds must be positive"),
    (["--agent", "gold", "--out", "/no/such/folder/f.json"], "cannot write /no/such/folder/f.json"),
    (["--agent", "gold", "--trajectories", "/"], "cannot write /"), (["--agent", "oracle"], "invalid choice")])
def test_wrong_arguments_are_refused_before_anything_runs(arguments, message, capsys):
    with pytest.raises(SystemExit) as exit:
        evaluate.main([*COUNTDOWN, *arguments])
    assert exit.value.code == 2 and message in capsys.readouterr().err


def test_an_interrupt_ends_with_130_and_no_file(tmp_path, monkeypatch, capsys):
    def interrupted(*arguments, **options):
        raise KeyboardInterrupt
    monkeypatch.setattr("envs.countdown.Countdown._step", interrupted)
    assert evaluate.main([*COUNTDOWN, "--agent", "gold", "--episodes", "2", "--out", str(tmp_path / "f.json")]) == 130
    assert not list(tmp_path.iterdir()) and "Traceback" not in capsys.readouterr().err


def test_an_environment_that_always_fails_ends_with_1(monkeypatch, capsys, tmp_path):
    def broken(*arguments):
        raise OSError("disk gone")
    monkeypatch.setattr("envs.countdown.Countdown._step", broken)
    assert evaluate.main([*COUNTDOWN, "--agent", "gold", "--episodes", "2", "--out", str(tmp_path / "f.json")]) == 1
    assert "disk gone" in capsys.readouterr().err and not list(tmp_path.iterdir())


def test_an_episode_past_its_deadline_is_dropped_and_the_others_count(tmp_path, monkeypatch, capsys):
    stuck = select_panel(envs.make("turngym/Countdown-v0"), "heldout", 2)[1].key

    def step(env, action, whole=Countdown._step):
        if env.task.key == stuck:
            time.sleep(10)
        return whole(env, action)
    monkeypatch.setattr(Countdown, "_step", step)
    monkeypatch.setattr(Countdown, "blocking", True)
    found = numbers([*COUNTDOWN, "--agent", "gold", "--episodes", "2", "--episode-seconds", "0.5"], tmp_path / "f.json")
    assert (found["n"], found["success_rate"], found["dropped"]) == (1, 1.0, 1)
    assert found["errors"] == {"error_timeout:TimeoutError": 1} and "TimeoutError" in capsys.readouterr().err


def test_an_environment_of_ones_own_is_found_from_its_folder(tmp_path):
    (tmp_path / "guess_env.py").write_text(GUESS, encoding="utf-8")
    # A module of ours is not the user's, even where the user has one of that name.
    (tmp_path / "scripts.py").write_text("raise RuntimeError('the wrong scripts')", encoding="utf-8")
    command = f"import sys; sys.path.append({str(ROOT)!r}); import turngym; sys.exit(turngym.main())"
    result = subprocess.run(
        [sys.executable, "-c", command, "evaluate", "--env", "guess_env:me/Guess-v0", "--agent", "random", "--split",
         "train", "--episodes", "5", "--samples", "4", "--option", "secret=3", "--references", "--out", "f.json"],
        cwd=tmp_path, capture_output=True, text=True, timeout=200, env={**os.environ, "OMP_WAIT_POLICY": "PASSIVE"})
    assert result.returncode == 0, result.stderr
    found = json.loads((tmp_path / "f.json").read_text())
    assert (found["env"], found["n"], found["options"]) == ("guess_env:me/Guess-v0", 20, ["secret=3"])
    # It knows no solutions: said, and no reason to fail.
    assert "no gold reference" in result.stderr and found["references"].keys() == {"noop"}
