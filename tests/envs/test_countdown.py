"""The Countdown environment: its problems, its tool protocol, its ends."""

import itertools
import json
import os
import subprocess
import sys
import threading
import time
from fractions import Fraction

import gymnasium
import numpy as np
import pytest

import envs
from envs.countdown_problems import Limits, training_problem
from envs.countdown_solver import solve
from rewards import calculate, score_countdown

ID = "turngym/Countdown-v0"


@pytest.fixture
def env():
    return envs.make(ID)


def problem(numbers, target):
    return envs.Task(key=f"{target}:{numbers}", data={"numbers": numbers, "target": target})


def start(env, numbers=(3, 8, 1), target=25):
    return env.reset(options={"task": problem(list(numbers), target)})[0]


# The tool protocol


def test_a_tool_call_is_answered_and_the_answer_ends_the_episode(env):
    assert start(env) == "Numbers: 3 8 1. Target: 25."
    observation, reward, terminated, truncated, info = env.step("<tool>3*8</tool>")
    assert (observation, reward, terminated, truncated) == ("<obs>24</obs>", 0.0, False, False)
    assert info["valid"] and not info["success"]
    assert env.step("<tool>7/3</tool>")[0] == "<obs>7/3</obs>"
    _, reward, terminated, truncated, info = env.step("<answer>3*8+1</answer>")
    assert (reward, terminated, truncated, info["success"], info["score"]) == (1.0, True, False, True, 1.0)


def test_a_wrong_answer_ends_the_episode_without_reward(env):
    start(env)
    _, reward, terminated, truncated, info = env.step("<answer>3*8</answer>")
    assert (reward, terminated, truncated, info["success"], info["score"]) == (0.0, True, False, False, 0.0)


@pytest.mark.parametrize("call", ["__import__('os').getpid()", "().__class__.__base__", "9**9**9**9", "1/0",
                                  "'a'*10**9", "(" * 5000, "", "no"])
def test_c3_a_malformed_call_gets_a_short_error_and_the_episode_goes_on(env, call):
    start(env)
    started = time.monotonic()
    observation, _, terminated, truncated, info = env.step(f"<tool>{call}</tool>")
    assert time.monotonic() - started < 0.2
    assert (observation, terminated, truncated, info["valid"]) == ("<obs>error</obs>", False, False, False)
    assert env.step("<answer>3*8+1</answer>")[4]["success"]


@pytest.mark.parametrize("action", ["", "   ", "look " * 2000, "open door then go north", "go\nnorth", "🚪",
                                    "e\u0301\u0302", "\x00", "\ud800", "search[", "click[a] click[b]", "<tool>3*8",
                                    "3*8+1", "</answer>", "<think><tool>3*8</tool></think>", "<tool>3*8</answer>"])
def test_odd_text_is_an_invalid_turn_and_no_exception(env, action):
    start(env)
    observation, reward, terminated, truncated, info = env.step(action)
    assert isinstance(observation, str) and len(observation) < 200
    assert (reward, terminated, truncated, info["valid"], info["turn"]) == (0.0, False, False, False, 1)
    env.state_key()
    assert env.step("<answer>3*8+1</answer>")[4]["success"]


def test_of_several_blocks_the_last_one_counts(env):
    start(env)
    assert env.step("<tool>1+1</tool> or <tool>2+2</tool>")[0] == "<obs>4</obs>"
    assert env.step("<answer>3*8+1</answer> let me check <tool>3*8+1</tool>")[0] == "<obs>25</obs>"
    assert env.step("<tool>3*8+1</tool> so <answer>3*8+1</answer>")[4]["success"]


@pytest.mark.parametrize("response, text", [
    ("I try <tool>3*8</tool>", "<tool>3*8</tool>"),
    ("<think>é 🚪 <tool>9</tool></think>\n<answer> 3*8+1 </answer> done", "<answer> 3*8+1 </answer>"),
    ("<tool>1</tool><tool>2</tool>", "<tool>2</tool>"),
    ("<tool>1</tool><answer>2</answer>", "<answer>2</answer>"),
    ("hidden <tool>1</tool></think><tool>2</tool>", "<tool>2</tool>"),
    ("nothing", ""), ("<tool>1", ""), ("", ""),
])
def test_parse_points_at_the_block_it_returns(env, response, text):
    span = env.parse(response)
    assert span.text == text == response[span.start:span.end]


def test_after_the_tool_rounds_only_an_answer_helps():
    env = envs.make(ID, tool_rounds=3)
    for last, success in (("<answer>3*8+1</answer>", True), ("<tool>3*8+1</tool>", False)):
        start(env)
        for _ in range(3):
            assert env.step("<tool>3*8</tool>")[2:4] == (False, False)
        _, reward, terminated, truncated, info = env.step(last)
        # Solved on the last turn is a success and no truncation; a fourth call is a truncation and no success.
        assert (reward, terminated, truncated, info["success"]) == (float(success), success, not success, success)
        with pytest.raises(gymnasium.error.ResetNeeded):
            env.step("<answer>3*8+1</answer>")


def test_ten_rounds_are_the_default(env):
    start(env)
    ends = [env.step("<tool>3*8</tool>")[3] for _ in range(11)]
    assert ends == [False] * 10 + [True]


def test_without_the_tool_one_response_ends_it():
    env = envs.make(ID, tool=False)
    assert env.stop == ("</answer>",) and "tool" not in env.system_prompt
    for response, success, valid in (("<answer>3*8+1</answer>", True, True), ("<answer>3*8</answer>", False, True),
                                     ("<tool>3*8+1</tool>", False, False), ("no idea", False, False)):
        start(env)
        _, reward, terminated, truncated, info = env.step(response)
        assert (reward, terminated, truncated) == (float(success), True, False)
        assert (info["success"], info["valid"]) == (success, valid)


def test_the_prompt_is_short_and_holds_no_answer():
    for tool in (True, False):
        env = envs.make(ID, tool=tool)
        assert len(env.system_prompt.split()) <= 60
        observation = start(env)
        assert score_countdown([3, 8, 1], 25, env.system_prompt + observation) == 0


# Problems


def keys(env, split, count=None):
    return [task.key for task in env.tasks(split)[:count]]


@pytest.mark.parametrize("options", [{}, {"min_numbers": 2, "max_numbers": 6}, {"max_numbers": 3, "largest_number": 20},
                                     {"smallest_target": -20, "largest_target": 0}])
def test_c5_splits_are_distinct_and_never_in_training(options):
    env = envs.make(ID, **options)
    heldout, test, train = keys(env, "heldout"), keys(env, "test"), keys(env, "train", 3000)
    assert (len(set(heldout)), len(set(test)), len(env.tasks("train"))) == (1024, 50, 1_000_000)
    assert len(heldout) == 1024 and len(test) == 50
    assert not set(heldout) & set(test) and not (set(heldout) | set(test)) & set(train)


def test_a_problem_belongs_to_one_split_whatever_the_options():
    # Demonstrations may be of other limits than the problems that are judged.
    easy = envs.make(ID, min_numbers=2, largest_number=12, smallest_target=1, largest_target=30)
    judged = envs.make(ID, min_numbers=3, largest_number=12, smallest_target=1, largest_target=30)
    train, heldout = set(keys(easy, "train", 5000)), set(keys(judged, "heldout"))
    assert len({key for key in train if key.count(",") == 2}) > 500 and not train & heldout


def test_a_problem_space_without_room_is_refused():
    with pytest.raises(ValueError, match="raise largest_number"):
        envs.make(ID, min_numbers=2, max_numbers=2, largest_number=5).tasks("heldout")


@pytest.mark.parametrize("options", [
    {"min_numbers": 1}, {"max_numbers": 7}, {"min_numbers": 5, "max_numbers": 4}, {"largest_number": 0},
    {"smallest_target": 9, "largest_target": 8}, {"tool_rounds": 0}, {"demonstration_tries": 10},
    {"demonstration_tries": -1},
])
def test_impossible_options_are_refused(options):
    with pytest.raises(ValueError, match=next(iter(options))):
        envs.make(ID, **options)


def test_an_unknown_split_is_refused(env):
    with pytest.raises(ValueError, match="'train', 'heldout' and 'test'"):
        env.tasks("validation")


def test_keys_are_the_target_and_the_sorted_numbers(env):
    for task in [*env.tasks("train")[:100], *env.tasks("test")]:
        numbers, target = task.data["numbers"], task.data["target"]
        assert task.key == f"{target}:{','.join(map(str, sorted(numbers)))}"
        assert task.family == f"{len(numbers)} numbers" and len(numbers) in (3, 4)
        assert all(1 <= n <= 99 for n in numbers) and 10 <= target <= 99


def test_item_i_is_the_same_whatever_the_order():
    tasks = envs.make(ID).tasks("train")
    forwards = [tasks[i].key for i in range(50)]
    assert [tasks[i].key for i in reversed(range(50))] == forwards[::-1]
    assert tasks[-1].key == tasks[999_999].key
    with pytest.raises(IndexError):
        tasks[1_000_000]


def test_problems_are_the_same_on_every_machine():
    # The fixed names guard against a generator that changes with the version of Python or of a library.
    env = envs.make(ID)
    assert keys(env, "train", 3) == ["86:5,10,36", "31:4,5,22", "25:5,64,94"]
    code = ("import envs; e = envs.make('turngym/Countdown-v0'); "
            "print(envs.panel_sha256(e.tasks('heldout')), envs.panel_sha256(e.tasks('train')[:200]))")
    here = f"{envs.panel_sha256(env.tasks('heldout'))} {envs.panel_sha256(env.tasks('train')[:200])}"
    for seed in ("0", "1"):
        child = subprocess.run([sys.executable, "-c", code], env={**os.environ, "PYTHONHASHSEED": seed}, text=True,
                               capture_output=True, check=True)
        assert child.stdout.strip() == here


def test_problems_are_made_quickly():
    training_problem(Limits(), 0)
    started = time.monotonic()
    for index in range(200):
        training_problem(Limits(), index)
    assert time.monotonic() - started < 2  # 0.1 ms each is usual


# Solver


def brute_force(numbers):
    """Every value of the numbers, by joining any two of them until one is left."""
    if len(numbers) == 1:
        return {numbers[0]}
    found = set()
    for i, j in itertools.permutations(range(len(numbers)), 2):
        rest = [n for k, n in enumerate(numbers) if k not in (i, j)]
        a, b = numbers[i], numbers[j]
        for value in [a + b, a - b, a * b] + ([a / b] if b else []):
            found |= brute_force([*rest, value])
    return found


@pytest.mark.parametrize("numbers", [(3, 8), (8, 8, 3, 3), (1, 1, 1), (0, 5, 7), (0, 0, 2), (3, 3, 5, 7), (2, 9, 13)])
def test_the_solver_finds_exactly_what_there_is(numbers):
    values = brute_force([Fraction(n) for n in numbers])
    for target in range(0, 60):
        solution = solve(numbers, target)
        assert (solution is not None) == (target in values), (numbers, target, solution)
        if solution:
            assert score_countdown(numbers, target, f"<answer>{solution}</answer>") == 1


def test_the_solver_knows_the_unary_minus():
    assert solve([3, 8], -11) == "-(3+8)"
    assert score_countdown([3, 8], -11, f"<answer>{solve([3, 8], -11)}</answer>") == 1


@pytest.mark.parametrize("numbers, target", [((25, 50, 75, 100, 3, 6), 952), ((3, 7, 13, 29, 53, 97), 100_003),
                                             ((1, 1, 1, 1, 1, 1), 99), ((7, 7, 7, 7, 7), 10)])
def test_six_numbers_are_solved_or_refused_within_seconds(numbers, target):
    started = time.monotonic()
    solution = solve(numbers, target)
    assert time.monotonic() - started < 20
    assert solution == solve(numbers, target)
    assert solution is None or score_countdown(numbers, target, f"<answer>{solution}</answer>") == 1


# Gold, random, worlds


@pytest.mark.parametrize("tries", [0, 4])
def test_gold_solves_after_different_wrong_tries(tries):
    env = envs.make(ID, demonstration_tries=tries)
    lengths = set()
    for number, task in enumerate(env.tasks("train")[:60]):
        env.reset(options={"task": task})
        responses = env.gold(np.random.default_rng(number))
        *wrong, check, answer = responses
        lengths.add(len(wrong))
        solution = answer.removeprefix("<answer>").removesuffix("</answer>")
        assert check == f"<tool>{solution}</tool>" and " " not in solution
        assert len(set(wrong)) == len(wrong) <= tries
        for call in wrong:
            text = call.removeprefix("<tool>").removesuffix("</tool>")
            assert calculate(text) not in ("error", str(task.data["target"]))
            # The try is a right answer to another target.
            assert 10 <= int(calculate(text)) <= 99
            assert score_countdown(task.data["numbers"], int(calculate(text)), f"<answer>{text}</answer>") == 1
        ends = [env.step(env.parse(response).text) for response in responses]
        assert ends[-1][4]["success"] and not any(end[2] for end in ends[:-1])
    assert lengths == set(range(tries + 1))


def test_gold_varies_with_its_generator_and_only_with_it(env):
    start(env, (2, 3, 4, 6), 24)
    assert env.gold(np.random.default_rng(1)) == env.gold(np.random.default_rng(1))
    assert len({env.gold(np.random.default_rng(seed))[-1] for seed in range(20)}) > 1


def test_two_equal_numbers_allow_few_tries_and_gold_still_ends():
    env = envs.make(ID, min_numbers=2, demonstration_tries=9)
    start(env, (5, 5), 10)
    # Beside 5+5 only 5*5 is between 10 and 99; 5-5 and 5/5 are not.
    assert max(len(env.gold(np.random.default_rng(seed))) for seed in range(30)) == 3


def test_an_unsolvable_problem_has_no_gold(env):
    start(env, (1, 1), 50)
    with pytest.raises(LookupError, match="50"):
        env.gold(np.random.default_rng(0))


def test_random_actions_are_well_formed(env):
    start(env)
    rng = np.random.default_rng(0)
    blocks = [env.random_action(rng) for _ in range(100)]
    assert {block[1:5] for block in blocks} == {"tool", "answ"}
    for block in blocks:
        assert env.parse(block).text == block
        assert calculate(block.split(">")[1].split("<")[0]) != "error"


def transcript(env, task, actions):
    rows = [env.reset(options={"task": task}), *(env.step(action) for action in actions)]
    return json.dumps(rows, sort_keys=True)


ACTIONS = ["<tool>1+1</tool>", "", "<tool>1/0</tool>", "<tool>(2+3)*4</tool>", "x", "<tool>7/3</tool>",
           "<tool>-2</tool>", "\ud800", "<tool>9**9</tool>", "<answer>1</answer>"]


def test_one_seed_gives_one_world(env):
    rows = []
    for _ in range(6):
        rows.append(json.dumps([env.reset(seed=1234), *(env.step(action) for action in ACTIONS)]))
    assert len(set(rows)) == 1
    assert len({env.reset(seed=seed)[0] for seed in range(1, 7)}) > 1


def test_a_group_plays_one_task_and_a_list_is_visited_in_order(env):
    tasks = env.tasks("test")[:5]
    workers = [envs.make(ID) for _ in range(4)]
    assert len({worker.reset(options={"task": tasks[2]})[0] for worker in workers}) == 1
    assert [env.reset(options={"task": task})[1]["task_key"] for task in tasks] == [task.key for task in tasks]
    assert env.task.env_id == ID


def test_sessions_do_not_see_each_other(env):
    tasks = env.tasks("test")[:4]
    sessions = [envs.make(ID) for _ in tasks]
    for session, task in zip(sessions, tasks):
        session.reset(options={"task": task})
    gold = sessions[1].gold(np.random.default_rng(0))[-1]
    infos = [session.step(gold if i == 1 else "<tool>1+1</tool>")[4] for i, session in enumerate(sessions)]
    assert [info["success"] for info in infos] == [False, True, False, False]
    serial = [transcript(env, task, ACTIONS) for task in tasks]
    results = [None] * 4

    def play(i):
        results[i] = transcript(sessions[i], tasks[i], ACTIONS)
    threads = [threading.Thread(target=play, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == serial


def test_every_property_of_an_environment_holds():
    for options in ({"demonstration_tries": 3}, {"tool": False}):
        results = envs.check_text_env(ID, **options)
        assert not [result for result in results if not result.ok]
        assert [result.name for result in results if result.skipped] == ["admissible actions"]
