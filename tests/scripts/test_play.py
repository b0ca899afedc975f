"""A person plays in the terminal, or a pipe does."""

import io

import numpy as np
import pytest

import envs
from scripts import play

ID = "turngym/Countdown-v0"


@pytest.fixture
def typed(monkeypatch):
    return lambda text: monkeypatch.setattr("sys.stdin", io.StringIO(text))


def test_an_episode_shows_what_the_environment_answers(typed, capsys):
    task = envs.make(ID).tasks("heldout")[3]
    env = envs.make(ID)
    env.reset(options={"task": task})
    solution = env.gold(np.random.default_rng(0))[-1]
    typed(f"[bold]nothing\n<tool>3*8</tool>\n{solution}\n")
    assert play.main([ID, "--split", "heldout", "--task", "3"]) == 0
    shown = capsys.readouterr().out
    for text in (task.key, "Target: ", "invalid", "<obs>24</obs>", "Right.", "success  reward 1  score 1"):
        assert text in shown


def test_a_task_is_found_by_its_key_and_by_the_seed(typed, capsys):
    task = envs.make(ID).tasks("test")[7]
    typed("<answer>1</answer>\n")
    assert play.main([ID, "--split", "test", "--task", task.key]) == 0
    assert task.key in capsys.readouterr().out
    shown = []
    for _ in range(2):
        typed("<answer>1</answer>\n")
        play.main([ID, "--seed", "5"])
        shown.append(capsys.readouterr().out)
    assert shown[0] == shown[1] and "no success" in shown[0]


def test_running_out_of_turns_is_said(typed, capsys):
    typed("<tool>1</tool>\n" * 2)
    assert play.main([ID, "--option", "tool_rounds=1"]) == 0
    assert "out of turns" in capsys.readouterr().out


def test_the_end_of_the_input_leaves_cleanly(typed, capsys):
    typed("<tool>3*8</tool>\n")
    assert play.main([ID]) == 0
    assert "left before the end" in capsys.readouterr().out


def test_an_interrupt_leaves_cleanly(monkeypatch, capsys):
    def interrupted(*_):
        raise KeyboardInterrupt
    monkeypatch.setattr("rich.console.Console.input", interrupted)
    assert play.main([ID]) == 0
    assert "left before the end" in capsys.readouterr().out


@pytest.mark.parametrize("arguments, message", [
    (["turngym/Cuntdown-v0"], "Did you mean: `Countdown`"), ([ID, "--split", "validation"], "'heldout'"),
    ([ID, "--task", "1000000"], "1000000"), ([ID, "--split", "test", "--task", "1:2"], "0 to 49"),
    ([ID, "--option", "tool_rounds=0"], "tool_rounds"), ([ID, "--split", "test", "--task", "50"], "0 to 49"),
    (["turngym/Math-v0", "--option", "data=no_such.jsonl"], "no_such.jsonl"),
])
def test_what_does_not_exist_is_named(arguments, message, capsys):
    assert play.main(arguments) == 2
    assert message in capsys.readouterr().err
