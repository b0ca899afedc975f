import ast
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import reasoning_gym

import envs
from envs.reasoning_worker import SAFE_SCORERS, catalogue

# Datasets that know no right answer to their own problems, only how to check one.
WITHOUT_GOLD = {"boxnet", "rush_hour"}
# Installed code that evaluates text as Python, and whose text that is. A file that is not named here is new: read it,
# and give its dataset a scorer of ours where the text comes from the model.
EVALUATES_THE_ANSWER = {
    "algebra/intermediate_integration.py", "algebra/polynomial_multiplication.py", "algebra/simple_integration.py",
    "algorithmic/binary_matrix.py", "algorithmic/spiral_matrix.py", "algorithmic/string_insertion.py",
    "games/countdown.py", "games/n_queens.py", "games/puzzle24.py",
}
EVALUATES_ITS_OWN_TEXT = {
    "algorithmic/number_sorting.py", "arithmetic/basic_arithmetic.py", "arithmetic/bitwise_arithmetic.py",
    "arithmetic/gsm_symbolic/generators_00_49.py", "arithmetic/gsm_symbolic/generators_50_99.py", "code/codeio.py",
    "code/bf.py",  # compiles its own programs to Brainfuck
    "logic/propositional_logic.py",  # its parse_expr is its own parser of formulas, not sympy's
}
EVALUATORS = {"eval", "exec", "parse_expr", "sympify", "parse_latex", "literal_eval", "compile", "__import__", "system",
              "Popen", "lambdify"}


def make(dataset, **options):
    return envs.make("turngym/ReasoningGym-v0", dataset=dataset, size=16, **options)


def play(env, task, answer):
    env.reset(options={"task": task})
    return env.step(answer)


@pytest.mark.parametrize("name", catalogue())
def test_the_gold_answer_is_a_success_and_junk_is_nothing(name):
    env = make(name)
    task = env.tasks("heldout")[0]
    assert task.family == name
    env.reset(options={"task": task})
    if name in WITHOUT_GOLD:
        with pytest.raises(LookupError, match=name):
            env.gold(None)
    else:
        [gold] = env.gold(None)
        _, reward, terminated, _, info = env.step(env.parse(gold).text)
        assert (reward, terminated, info["success"]) == (1.0, True, True)
    for junk in ("I do not know", "\u2603 \ud800 \x00", "[" * 3000):
        _, reward, _, _, info = play(env, task, junk)
        assert 0.0 <= reward < 1.0 and not info["success"], junk


@pytest.mark.parametrize("name", sorted(set(SAFE_SCORERS)))
def test_no_code_of_an_answer_is_run(name, tmp_path, capfd):
    marker = tmp_path / "marker"
    env = make(name)
    task = env.tasks("heldout")[0]
    for code in (f"__import__('os').system('touch {marker}')", f"open({str(marker)!r}, 'w')", "[print(1)]",
                 f"(lambda: __import__('pathlib').Path({str(marker)!r}).touch())()"):
        assert play(env, task, code)[1] == 0.0
    assert not marker.exists()
    assert capfd.readouterr() == ("", "")


def test_every_installed_scorer_that_evaluates_is_known():
    root = Path(reasoning_gym.__file__).parent
    found = set()
    for path in root.rglob("*.py"):
        if "contrib/bfit" in path.as_posix():
            continue  # a Brainfuck compiler of its own, whose `compile` is no Python's
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call):
                name = getattr(node.func, "id", getattr(node.func, "attr", ""))
                owner = getattr(getattr(node.func, "value", None), "id", "")
                if name in EVALUATORS and owner != "re":
                    found.add(path.relative_to(root).as_posix())
    assert found == EVALUATES_THE_ANSWER | EVALUATES_ITS_OWN_TEXT
    assert {Path(path).stem for path in EVALUATES_THE_ANSWER} <= set(SAFE_SCORERS)


def test_wrong_answers_that_the_library_calls_right():
    def reward(name, answer):
        env = make(name)
        env.reset(options={"task": env.tasks("heldout")[0]})
        [gold] = env.gold(None)
        return env.step(answer(env.parse(gold).text))[1]
    assert reward("game_of_life_halting", lambda gold: "True" if gold == "False" else "False") == 0.0
    assert reward("word_sorting", lambda gold: gold + ", zebra") == 0.0
    assert reward("figlet_font", lambda gold: gold + "XY") == 0.0
    # Any four numbers of the allowed range make 24; only the given ones count.
    assert reward("puzzle24", lambda gold: "6*4*1*1") == 0.0


@pytest.mark.parametrize("name, right, wrong", [
    ("simple_integration", lambda gold: f"7 + {gold}", lambda gold: f"2*({gold})"),
    ("polynomial_multiplication", lambda gold: gold.replace("**", "^"), lambda gold: f"{gold} + 1"),
    ("countdown", lambda gold: f"({gold})", lambda gold: f"{gold} + 0"),
])
def test_safe_scorers_accept_equal_forms_only(name, right, wrong):
    env = make(name)
    task = env.tasks("heldout")[1]
    env.reset(options={"task": task})
    gold = env.parse(env.gold(None)[0]).text
    assert play(env, task, right(gold))[1] == 1.0
    assert play(env, task, wrong(gold))[1] == 0.0


@pytest.mark.parametrize("name, answer", [("coin_flip", "1e999999999"), ("polynomial_multiplication", "9**9**9**9")])
def test_a_number_without_end_is_a_zero_in_bounded_time(name, answer):
    env = make(name)
    begin = time.monotonic()
    assert play(env, env.tasks("train")[0], answer)[1] == 0.0
    assert time.monotonic() - begin < 60


def test_no_question_is_in_two_splits_even_in_a_small_dataset():
    env = envs.make("turngym/ReasoningGym-v0", dataset="coin_flip", size=64)
    train, heldout, test = ({task.data["question"] for task in env.tasks(split)}
                            for split in ("train", "heldout", "test"))
    assert not train & heldout and not train & test and not heldout & test


def test_a_question_that_comes_twice_is_two_tasks():
    tasks = envs.make("turngym/ReasoningGym-v0", dataset="coin_flip", size=64).tasks("train")
    assert len({task.data["question"] for task in tasks}) < len({task.key for task in tasks}) == 64


def test_several_datasets_take_turns():
    env = make(["maze", "chain_sum"], config={"chain_sum": {"min_terms": 2, "max_terms": 2}})
    tasks = env.tasks("train")
    assert len(tasks) == 32 and [task.family for task in tasks[:4]] == ["maze", "chain_sum"] * 2
    assert tasks[1].data["question"].count("+") + tasks[1].data["question"].count(" - ") == 1


@pytest.mark.parametrize("options, message", [
    ({"dataset": "chain_sums"}, "no reasoning-gym dataset chain_sums; there are: ab, "),
    ({"dataset": []}, "none given"), ({"dataset": "composite"}, "composite"),
    ({"dataset": "chain_sum", "config": {"no_such_option": 1}}, "chain_sum.*no_such_option"),
    ({"dataset": ["maze", "ab"], "config": {"sudoku": {}}}, "sudoku"), ({"size": 0}, "size"),
])
def test_wrong_options_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        envs.make("turngym/ReasoningGym-v0", **options)


def test_the_same_key_is_the_same_problem_whatever_the_hash_seed():
    # These draw from the order of a set or from the global generators.
    names = ["isomorphic_strings", "knight_swap", "list_functions", "polynomial_multiplication", "ransom_note",
             "word_ladder", "pool_matrix"]
    script = ("import json, envs\n"
              f"env = envs.make('turngym/ReasoningGym-v0', dataset={names}, size=8)\n"
              "print(json.dumps([task.data['question'] for task in env.tasks('train')[:14]]))")
    answers = [subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True,
                              env={**os.environ, "PYTHONHASHSEED": seed}).stdout for seed in ("1", "2")]
    assert json.loads(answers[0]) == json.loads(answers[1])


def test_the_environment_has_every_property():
    failed = [result for result in envs.check_text_env("turngym/ReasoningGym-v0", episodes=5) if not result.ok]
    assert not failed
