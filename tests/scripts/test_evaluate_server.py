"""`scripts.evaluate` evaluates a model behind a server: of chat completions, and of token ids."""

import json

import numpy as np
import pytest

import envs
from rewards.tags import last_block
from scripts import evaluate
from tests.agents.chat_server import failed, said, serving
from tests.agents.fake_vllm import interpreter, serving_vllm
from tests.agents.policies import random_policy
from trainers.transcripts import read_trajectories

KEY = "sk-secret-0123456789"


def gold_server():
    """Answers every Countdown problem with its gold response for the turn."""
    env = envs.make("turngym/Countdown-v0")
    tasks = {env.reset(options={"task": task})[0]: task for task in env.tasks("heldout")[:8]}

    def answer(_, body):
        system, first, *rest = body["messages"]
        assert system["content"] == env.system_prompt and first["content"] in tasks
        env.reset(options={"task": tasks[first["content"]]})
        text = env.gold(np.random.default_rng(0))[len(rest) // 2]
        block = last_block(text, env.action_tags)
        return said(text[:block.end() - len(f"</{block[1]}>")])  # as OpenAI does, without the stop text
    return answer


def evaluated(server, tmp_path, *arguments):
    path = tmp_path / "f.json"
    code = evaluate.main(["--env", "turngym/Countdown-v0", "--agent", "model", "--engine", "openai", "--model", "gold",
                          "--base-url", server.url, "--episodes", "8", "--out", str(path), *arguments])
    return code, json.loads(path.read_text(encoding="utf-8")) if path.exists() else None


def test_a_server_that_knows_the_solutions_is_evaluated_to_one(tmp_path, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", KEY)
    episodes = tmp_path / "t.jsonl"
    with serving(gold_server()) as server:
        code, found = evaluated(server, tmp_path, "--trajectories", str(episodes), "--concurrency", "1")
        assert code == 0 and {body["temperature"] for body in server.bodies} == {0.0} and server.most == 1
        assert {body["max_tokens"] for body in server.bodies} == {512}
    assert (found["n"], found["success_rate"], found["turns"], found["invalid"]) == (8, 1.0, 2.0, 0.0)
    assert (found["engine"], found["base_url"], found["model"]) == ("openai", server.url, "gold")
    played = read_trajectories(episodes)
    assert all(turn.text.endswith(("</tool>", "</answer>")) for t in played for turn in t.turns)
    assert KEY not in episodes.read_text() + (tmp_path / "f.json").read_text()


def test_a_refusal_ends_the_evaluation_with_one_line(tmp_path, capsys):
    with serving(lambda *_: failed(404, "The model `gold` does not exist.")) as server:
        code, found = evaluated(server, tmp_path)
    shown = capsys.readouterr().err
    assert (code, found) == (1, None) and "Traceback" not in shown and "does not exist" in shown
    assert len(shown.splitlines()) == 1


@pytest.mark.parametrize("arguments", [["--base-url", "http://me:hush@h/v1"], ["--base-url", "h:8000"]])
def test_a_wrong_address_is_an_argument_error(arguments, tmp_path, capsys):
    with serving(lambda *_: said("x")) as server:
        assert evaluated(server, tmp_path, *arguments) == (2, None)
    shown = capsys.readouterr().err
    assert "the base URL must" in shown and "hush" not in shown and "Traceback" not in shown


@pytest.mark.parametrize("started", [False, True])
def test_a_vllm_server_plays_the_episodes_that_transformers_plays(started, tmp_path):
    policy = random_policy(max_position_embeddings=512)
    policy.save(tmp_path / "model")

    def played(name, *engine):
        path = tmp_path / f"{name}.jsonl"
        assert evaluate.main(["--env", "turngym/Countdown-v0", "--agent", "model", "--model", str(tmp_path / "model"),
                              "--episodes", "4", "--samples", "2", "--max-response-tokens", "6",
                              "--trajectories", str(path), *engine]) == 0
        return [[turn.response_ids.tolist() for turn in one.turns] for one in read_trajectories(path)]
    expected = played("transformers")
    if started:
        assert played("vllm", "--engine", "vllm", "--vllm-python", interpreter(tmp_path)) == expected
    else:
        with serving_vllm(policy) as server:
            assert played("vllm", "--engine", "vllm", "--base-url", server.url) == expected


def test_a_vllm_server_that_does_not_start_ends_the_evaluation_with_its_last_words(tmp_path, capsys):
    random_policy().save(tmp_path / "model")
    code = evaluate.main(["--env", "turngym/Countdown-v0", "--agent", "model", "--model", str(tmp_path / "model"),
                          "--engine", "vllm", "--vllm-python", "/bin/false"])
    assert code == 1 and "the vLLM server ended while it started" in capsys.readouterr().err
