"""`turngym/ALFWorld-v0`."""

import hashlib
import importlib.util
import json
import os
import pickle
import random
import subprocess
import sys
import threading

import numpy as np
import pytest

import envs
from envs.alfworld_games import FAMILIES, MISSING

if importlib.util.find_spec("alfworld") is None:
    pytest.skip(MISSING, allow_module_level=True)

ID = "turngym/ALFWorld-v0"
KEYS = ["train/pick/326/0", "train/look/314/1", "train/clean/428/2"]
GOALS = ["put some basketball on bed.", "look at creditcard under the desklamp.",
         "clean some soapbar and put it in countertop."]


@pytest.fixture(autouse=True)
def generated_games(monkeypatch):
    monkeypatch.delenv("ALFWORLD_DATA", raising=False)


@pytest.fixture
def env():
    return envs.make(ID)


def start(env, index=0, split="train"):
    return env.reset(options={"task": env.tasks(split)[index]})


def play(env, responses):
    return [env.step(env.parse(response).text) for response in responses]


def test_gold_solves_every_family_in_every_split(env):
    for split in ("train", "seen", "unseen"):
        for index in range(30):
            start(env, index, split)
            *before, end = play(env, env.gold(np.random.default_rng(index)))
            assert end[1:4] == (1.0, True, False) and end[4]["success"] and end[4]["score"] == 1.0
            assert all(step[4]["valid"] and not step[4]["success"] and step[1] == 0.0 for step in before)


def test_gold_varies_and_may_search_first():
    plain, searching = envs.make(ID), envs.make(ID, demonstration_searches=6)
    lengths = {}
    for env in (plain, searching):
        start(env, 3)
        plans = [env.gold(np.random.default_rng(seed)) for seed in range(30)]
        assert plans[0] == env.gold(np.random.default_rng(0)) and len(set(map(tuple, plans))) > 1
        lengths[env] = {len(actions) for actions in plans}
        for actions in plans[:10]:
            start(env, 3)
            assert play(env, actions)[-1][4]["success"]
    assert max(lengths[searching]) > max(lengths[plain])


def test_a_solution_longer_than_the_episode_is_no_gold():
    env = envs.make(ID, max_turns=2)
    start(env, 3)
    with pytest.raises(LookupError, match="there are 2"):
        env.gold(np.random.default_rng(0))


def test_fifty_looks_are_a_truncation_and_no_success(env):
    start(env)
    ends = [env.step("look")[1:4] for _ in range(50)]
    assert ends == [(0.0, False, False)] * 49 + [(0.0, False, True)]


def test_success_on_the_last_allowed_turn_counts():
    length = len(gold_of(envs.make(ID), 2))
    env = envs.make(ID, max_turns=length)
    end = play(env, gold_of(env, 2))[-1]
    assert end[1:4] == (1.0, True, False) and end[4]["success"]


def gold_of(env, index):
    start(env, index)
    return env.gold(np.random.default_rng(0))


@pytest.mark.parametrize("action", [
    "", "   ", "look " * 2000, "go to shelf 1 then look", "go to\nnorth", "🚪", "e\u0301 go", "go\x00to", "go \ud800",
    "search[", "click[a] click[b]", "put " * 2000, "{o.name}", "__import__('os').getpid()", "<action>look</action>"])
def test_odd_text_is_an_invalid_turn_and_the_next_one_works(env, action):
    start(env)
    before = env.state_key()
    observation, reward, terminated, truncated, info = env.step(action)
    assert observation.startswith("Nothing happens.") and (reward, terminated, truncated) == (0.0, False, False)
    assert not info["valid"] and info["turn"] == 1 and env.state_key() == before
    assert env.step("look")[4]["valid"]


def test_actions_are_admissible_and_the_older_wording_too(env):
    for index in range(6):
        actions = gold_of(env, index)
        for response in actions:
            action = env.parse(response).text
            assert action in env.admissible_actions()
            older = action.replace("move ", "put ").replace(" to ", " in/on ") if action.startswith("move") else action
            info = env.step(older.upper())[4]
            assert info["valid"]
        assert info["success"]


def test_possible_actions_are_listed_unless_unwanted():
    env = envs.make(ID)
    observation = start(env)[0]
    assert observation.endswith(f"Possible actions: {', '.join(env.admissible_actions())}")
    assert "Possible actions" not in start(envs.make(ID, list_actions=False))[0]


def test_splits_play_in_the_rooms_they_should():
    env = envs.make(ID)
    for split, unseen in (("train", False), ("seen", False), ("unseen", True)):
        tasks = env.tasks(split)[:60]
        assert [task.family for task in tasks[:6]] == list(FAMILIES)
        assert len({task.key for task in tasks}) == 60
        # ALFRED keeps the first six of each thirty rooms unseen: 1-6, 201-206, 301-306, 401-406.
        assert all((task.data["scene"] % 100 <= 6) == unseen for task in tasks)
    assert envs.panel_sha256(env.tasks("heldout")) == envs.panel_sha256(env.tasks("seen"))
    assert envs.panel_sha256(env.tasks("test")) == envs.panel_sha256(env.tasks("valid_unseen"))
    assert (len(env.tasks("train")), len(env.tasks("seen")), len(env.tasks("unseen"))) == (60_000, 600, 600)
    with pytest.raises(ValueError, match="has no split 'validation'"):
        env.tasks("validation")


def transcript(env, index, seed=0):
    """An episode of random actions as text."""
    rng, rows = np.random.default_rng(seed), [start(env, index)]
    for _ in range(20):
        rows.append(env.step(env.parse(env.random_action(rng)).text))
    return json.dumps([rows, env.state_key()], sort_keys=True)


def test_games_are_the_same_in_every_process(env):
    code = ("import envs, hashlib; from tests.envs.test_alfworld import ID, transcript; env = envs.make(ID); "
            "print(hashlib.sha256(''.join(transcript(env, i) for i in range(12)).encode()).hexdigest())")
    here = hashlib.sha256("".join(transcript(env, index) for index in range(12)).encode()).hexdigest()
    child = subprocess.run([sys.executable, "-c", code], env={**os.environ, "PYTHONHASHSEED": "1"}, text=True,
                           capture_output=True, check=True)
    assert child.stdout.strip() == here


def test_games_do_not_change_from_version_to_version(env):
    # The fixed names guard against a generator that changes with the version of Python or of a library.
    assert [env.tasks("train")[index].key for index in range(3)] == KEYS
    assert [start(env, index)[0].split("Your task is to: ")[1].split("\n")[0] for index in range(3)] == GOALS


def test_global_generators_and_the_process_are_left_alone(env):
    random.seed(7)
    np.random.seed(7)
    before = random.getstate(), np.random.get_state()[1].tolist(), sys.argv, os.environ.copy()
    transcript(env, 1)
    env.gold(np.random.default_rng(0))
    assert (random.getstate(), np.random.get_state()[1].tolist(), sys.argv, os.environ.copy()) == before


def test_sessions_do_not_see_each_other(env):
    serial = [transcript(env, index) for index in range(4)]
    sessions = [envs.make(ID) for _ in range(4)]
    results = [None] * 4

    def run(index):
        results[index] = transcript(sessions[index], index)
    threads = [threading.Thread(target=run, args=(index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == serial
    plans = [gold_of(session, index) for index, session in enumerate(sessions)]
    ends = [play(session, plans[1] if index == 1 else ["<action>look</action>"])[-1]
            for index, session in enumerate(sessions)]
    assert [end[4]["success"] for end in ends] == [False, True, False, False]


def test_a_snapshot_is_a_copy_of_the_state_and_survives_pickling(env):
    actions = gold_of(env, 5)
    half = len(actions) // 2
    play(env, actions[:half])
    key, snapshot = env.state_key(), pickle.loads(pickle.dumps(env.snapshot()))
    first = play(env, actions[half:])
    assert first[-1][4]["success"]
    other = envs.make(ID)
    start(other, 9)
    for restored in (env, other):
        restored.restore(snapshot)
        assert restored.state_key() == key and restored.task.key == snapshot.task.key
        assert play(restored, actions[half:]) == first
    ended = env.snapshot()
    start(env, 5)
    env.restore(ended)
    with pytest.raises(Exception, match="reset"):
        env.step("look")


def test_equal_states_have_equal_keys_however_they_came_about(env):
    start(env)
    places = [action for action in env.admissible_actions() if action.startswith("go to")]
    keys = [env.state_key()]
    for action in (places[0], "look", places[1], "nonsense", places[0]):
        env.step(action)
        keys.append(env.state_key())
    assert keys[1] == keys[2] == keys[5] and keys[3] == keys[4] and len(set(keys)) == 3


def test_random_and_silent_agents_hardly_ever_succeed(env):
    rng, wins = np.random.default_rng(0), 0
    for index in range(20):
        start(env, index)
        end = None
        while end is None or not (end[2] or end[3]):
            end = env.step(env.parse(env.random_action(rng)).text)
        wins += end[4]["success"]
    assert wins <= 3


def test_every_property_of_an_environment_holds():
    results = envs.check_text_env(ID, episodes=4)
    assert not [result for result in results if not result.ok or result.skipped]


def test_without_the_package_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match=r'pip install "turngym\[alfworld\]"'):
        envs.make(ID)


def test_chosen_families_are_the_same_games_alone(env):
    some = envs.make(ID, families=["pick two", "look"])
    for split in ("train", "seen"):
        wanted = [task for task in env.tasks(split)[:60] if task.family in ("look", "pick two")]
        assert list(some.tasks(split)[:20]) == wanted
    assert len(some.tasks("unseen")) == 200  # two of six families of 600 games


@pytest.mark.parametrize("options", [{"max_turns": 0}, {"demonstration_searches": -1}, {"families": ["wash"]},
                                     {"families": []}, {"families": "pick"}])
def test_impossible_options_are_refused(options):
    with pytest.raises(ValueError, match=next(iter(options))):
        envs.make(ID, **options)


# Original games


@pytest.fixture
def original(tmp_path, env):
    """A folder laid out as ALFWorld's own, with one game of each family in every split, and the environment's games
    that they were written from."""
    from envs.alfworld_textworld import game_file
    games = {}
    for split in ("train", "valid_seen", "valid_unseen"):
        for index, (family, long_name) in enumerate(FAMILIES.items()):
            start(env, index)
            folder = tmp_path / "json_2.1.1" / split / f"{long_name}-Thing-None-Place-{index}" / "trial_T1"
            folder.mkdir(parents=True)
            data = game_file(env.game)
            if split == "train":  # as the older release words it
                data["grammar"] = data["grammar"].replace("move {o} to {r}", "put {o} in/on {r}")
            (folder / "game.tw-pddl").write_text(json.dumps(data))
            params = {"object_target": env.game.target.removesuffix("type").title(), "mrecep_target": "",
                      "parent_target": "" if family == "look" else env.game.destination.removesuffix("type"),
                      "toggle_target": "DeskLamp" if family == "look" else "", "object_sliced": False}
            (folder / "traj_data.json").write_text(json.dumps({"task_type": long_name, "pddl_params": params}))
            games[family] = env.game
    return tmp_path / "json_2.1.1", games


def test_original_games_are_played_by_the_same_class(original, monkeypatch):
    folder, games = original
    monkeypatch.setenv("ALFWORLD_DATA", str(folder.parent))
    env = envs.make(ID)
    assert env.tasks("unseen")[0].key.startswith("valid_unseen/")
    for split in ("train", "heldout", "valid_unseen"):
        tasks = env.tasks(split)
        assert {task.family for task in tasks} == set(FAMILIES) and len(tasks) == 6
        for task in tasks:
            env.reset(options={"task": task})
            assert env.game.task == games[task.family].task and env.game.facts == games[task.family].facts
            assert play(env, env.gold(np.random.default_rng(0)))[-1][4]["success"]


def test_chosen_families_of_the_original_games(original):
    folder, _ = original
    for family in ("heat", "look"):
        env = envs.make(ID, data=str(folder.parent), families=[family])
        assert [task.family for task in env.tasks("train")] == [family]
    next((folder / "valid_seen").glob("look*")).rename(folder / "elsewhere")
    with pytest.raises(FileNotFoundError, match="no game of look"):
        env.tasks("seen")


def test_games_that_alfworld_leaves_out_are_left_out(original):
    folder, _ = original
    for game in (folder / "train").glob("*"):
        if game.name.startswith("pick_two"):
            game.rename(folder / "train" / "pick_two_obj_and_place-AppleSliced-None-Place-9")
        elif game.name.startswith("look"):
            game.rename(folder / "train" / "pick_and_place_with_movable_recep-Apple-Bowl-Place-9")
        elif game.name.startswith("pick_heat"):
            file = game / "trial_T1" / "game.tw-pddl"
            file.write_text(file.read_text().replace('"solvable": true', '"solvable": false'))
    families = {task.family for task in envs.make(ID, data=str(folder.parent)).tasks("train")}
    assert families == {"pick", "clean", "cool"}


@pytest.mark.parametrize("name, damage, message", [
    ("game.tw-pddl", lambda text: text[:-1], "JSONDecodeError"),
    ("game.tw-pddl", lambda text: text.replace("(:goal", "(:gaol"), "no .:goal"),
    ("game.tw-pddl", lambda text: text.replace("(not (holdsAny ?a))", ""), "pickupobject, putobject differ"),
    ("traj_data.json", lambda text: text.replace("task_type", "type"), "task_type"),
    ("traj_data.json", lambda text: text.replace("pick_", "dance_"), "dance_"),
])
def test_a_broken_game_is_named(original, name, damage, message):
    folder, _ = original
    env = envs.make(ID, data=str(folder.parent))
    task = next(task for task in env.tasks("train") if task.family == "pick")
    file = folder.parent / "json_2.1.1" / task.key / name
    file.write_text(damage(file.read_text()))
    with pytest.raises(ValueError, match=f"{task.key}.*{message}"):
        env.reset(options={"task": task})


def test_missing_data_is_one_clear_error(original, tmp_path, monkeypatch):
    monkeypatch.setenv("ALFWORLD_DATA", str(tmp_path / "nowhere"))
    with pytest.raises(FileNotFoundError, match=r"nowhere.*alfworld-download"):
        envs.make(ID)
    folder, _ = original
    env = envs.make(ID, data=str(folder.parent))
    with pytest.raises(ValueError, match=r"no game of .*check data= and ALFWORLD_DATA"):
        env.reset(options={"task": envs.Task(key="train/../../secret")})
    monkeypatch.delenv("ALFWORLD_DATA")
    with pytest.raises(ValueError, match="no game of the generated ones"):
        envs.make(ID).reset(options={"task": env.tasks("train")[0]})
