"""Environments of other libraries run by id, with this project's meaning of success, validity and error."""

import json
import pickle
import re

import gymnasium
import pytest

import envs
from envs.adapters import gymnasium as gymnasium_adapter
from envs.adapters.foreign import read_rows
from envs.adapters.trl import TRL
from tests.envs import adapted  # noqa: F401 (registers the environments)


def write_rows(path, *rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def start(env_id, **options):
    env = envs.make(env_id, **options)
    env.reset(options={"task": env.tasks("train")[0]})
    return env


def failures(env_or_id, **options):
    return [result for result in envs.check_text_env(env_or_id, episodes=2, **options) if not result.ok]


# gymnasium.Env


def test_a_game_of_gymnasiums_passes_every_check_also_in_other_processes():
    assert failures("FrozenLake-v1", max_episode_steps=10) == []


@pytest.mark.parametrize("env_id", ["Taxi-v4", "CliffWalking-v1", "Blackjack-v1"])
def test_the_same_seed_and_actions_give_the_same_episode(env_id):
    episodes = []
    for _ in range(2):
        env = start(env_id)
        actions = [action for action in env.admissible_actions() for _ in range(2)]
        steps = [env.step(action) for action, _ in zip(actions, range(20)) if not env._over]
        episodes.append(json.dumps(steps, default=envs.core.json_value))
    assert episodes[0] == episodes[1]


def test_actions_go_by_name_or_number_and_the_way_is_solved():
    env = start("FrozenLake-v1", is_slippery=False)
    assert env.admissible_actions() == ["left", "down", "right", "up"]
    # Around the holes of the 4x4 map: SFFF FHFH FFFH HFFG.
    for action in ("down", "1", " Right ", "2", "DOWN"):
        *_, terminated, _, info = env.step(action)
        assert info["valid"] and not terminated
    assert env.step("right")[1:4] == (1.0, True, False)
    assert envs.make("FrozenLake-v1").max_turns == 100


def test_the_end_in_a_hole_is_no_success():
    env = start("FrozenLake-v1", is_slippery=False)
    env.step("down")
    _, reward, terminated, _, info = env.step("right")
    assert (reward, terminated, info["success"], info["score"]) == (0.0, True, False, 0.0)


@pytest.mark.parametrize("action", ["", "   ", "4", "-1", "fly", "left then down", "left\nup", "1.0", "²", "１", "\x00",
                                    "\ud800", "9" * 10_000, "0" * 5_000, "True", "[1]"])
def test_what_is_outside_the_space_is_invalid_and_not_played(action):
    env = start("FrozenLake-v1", is_slippery=False)
    first = env.env.unwrapped.s
    observation, reward, terminated, _, info = env.step(action)
    assert (reward, terminated, info["valid"], info["turn"], env.env.unwrapped.s) == (0.0, False, False, 1, first)
    assert "left, down, right, up" in observation


def test_the_picture_shows_where_the_agent_is():
    env = envs.make("FrozenLake-v1", is_slippery=False)
    assert "[S]FFF\nFHFH" in env.reset(seed=0)[0]
    assert "\x1b" not in env.step("down")[0]
    env = envs.make("Taxi-v4")
    observation = env.reset(seed=0)[0]
    assert "\x1b" not in observation and re.search(r"\(R|\(G|\(B|\(Y", observation)


def test_the_limit_of_the_spec_truncates():
    env = start("FrozenLake-v1", max_episode_steps=2)
    env.step("left")
    assert env.step("left")[2:4] == (False, True)


def test_a_limit_of_the_engines_own_truncates_and_is_no_success():
    env = start("adapted/Echo-v0", limit=2)
    env.step("a")
    _, _, terminated, truncated, info = env.step("b")
    assert (terminated, truncated, info["success"]) == (False, True, False)
    with pytest.raises(gymnasium.error.ResetNeeded):
        env.step("c")


def test_texts_reach_the_environment_and_odd_info_is_left_out():
    env = start("adapted/Echo-v0")
    assert env.parse("I say <action>end</action>").text == "end"
    assert not env.step("much too long for it")[4]["valid"]
    observation, reward, terminated, _, info = env.step("end")
    assert (observation, reward, terminated, info["success"], info["said"]) == ("you said end", 1.0, True, True, 1)
    assert "odd" not in info


def test_discrete_spaces_may_begin_anywhere_and_the_environment_says_what_success_is():
    env = start("adapted/Shifted-v0")
    assert env.actions == {"left": -1, "stay": 0, "right": 1}
    assert env.step("2")[4]["valid"] is False
    assert env.step("-1")[4]["success"] is False
    env = start("adapted/Shifted-v0")
    assert env.step("right")[4]["success"] is True  # though its reward is 0.25


def test_continuous_actions_are_refused_by_name():
    with pytest.raises(TypeError, match=r"Pendulum-v1 are Box.*text"):
        envs.make("Pendulum-v1")
    assert set(gymnasium_adapter.NAMES) == {"FrozenLakeEnv", "TaxiEnv", "CliffWalkingEnv", "BlackjackEnv"}


# Rows


def test_rows_are_in_one_split_each_and_a_tenth_is_held_out(tmp_path):
    rows = [{"prompt": f"q{i}"} for i in range(200)]
    splits = read_rows(write_rows(tmp_path / "data.jsonl", *rows, rows[0]))
    assert set(splits) == {"train", "heldout"} and len(splits["train"]) + len(splits["heldout"]) == 200
    assert 5 <= len(splits["heldout"]) <= 40  # 20 expected
    write_rows(tmp_path / "test.jsonl", rows[0], rows[1])
    assert rows[0] in read_rows(str(tmp_path))["test"] and rows[0] not in read_rows(str(tmp_path))["train"]


@pytest.mark.parametrize("text", ["{", "[1]", "3", '{"a": NaN}', "[" * 100_000, "null"])
def test_a_line_that_is_no_row_is_named(tmp_path, text):
    (tmp_path / "train.jsonl").write_text('{"prompt": "x"}\n' + text + "\n")
    with pytest.raises(ValueError, match=r"train\.jsonl, line 2"):
        read_rows(str(tmp_path))


def test_missing_and_empty_files_are_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"nowhere\.jsonl"):
        read_rows(str(tmp_path / "nowhere.jsonl"))
    with pytest.raises(ValueError, match="has no rows"):
        read_rows(str(tmp_path))


# skyrl-gym


def sums(tmp_path):
    return write_rows(tmp_path / "train.jsonl", *[
        {"data_source": "sums", "prompt": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": q}],
         "reward_spec": {"ground_truth": a}, "extra_info": {}} for q, a in [("2+2?", "4"), ("2+3?", "5")]],
        {"prompt": "6*7?", "reward_spec": {"ground_truth": "42"}, "extra_info": {"max_turns": 2}})


def test_skyrls_own_environment_is_played_and_graded(tmp_path):
    pytest.importorskip("skyrl_gym")
    env = envs.make("turngym/SkyRL-v0", environment="gsm8k_multi_turn", rows=sums(tmp_path))
    observation, info = env.reset(options={"task": env.tasks("train")[0]})
    assert (observation, env.system_prompt, info["family"]) == ("2+2?", "Be brief.", "sums")
    observation, reward, terminated, *_ = env.step("I do not know")
    assert "tentative" in observation and (reward, terminated) == (0.0, False)
    _, reward, terminated, _, info = env.step("so it is #### 4")
    assert (reward, terminated, info["success"]) == (1.0, True, True)


@pytest.mark.parametrize("environment", ["gsm8k_multi_turn", "skyrl_gym.envs.gsm8k.env:GSM8kEnv"])
def test_skyrls_environments_pass_every_check(tmp_path, environment):
    skyrl = pytest.importorskip("envs.adapters.skyrl")
    assert failures(skyrl.SkyRL(environment=environment, rows=sums(tmp_path))) == []


@pytest.mark.parametrize(("environment", "said"), [
    ("gsm9k", "gsm8k"), ("json:JSONDecoder", "BaseTextEnv"), ("json:Nothing", "Nothing"), (":", "module:Class")])
def test_an_unknown_skyrl_environment_is_named(tmp_path, environment, said):
    pytest.importorskip("skyrl_gym")
    with pytest.raises(ValueError, match=said):
        envs.make("turngym/SkyRL-v0", environment=environment, rows=sums(tmp_path))


# TRL


def guesses(tmp_path):
    return write_rows(tmp_path / "train.jsonl", {"prompt": [{"role": "user", "content": "Guess!"}], "secret": 3})


def make_trl(tmp_path, name="Guess", **options):
    return start("turngym/TRL-v0", environment=f"tests.envs.adapted:{name}", rows=guesses(tmp_path), **options)


def call(number):
    return json.dumps({"name": "guess", "arguments": {"number": number}})


def test_a_trl_class_passes_every_check(tmp_path):
    assert failures(TRL(environment="tests.envs.adapted:Guess", rows=guesses(tmp_path))) == []


def test_tools_are_shown_and_called(tmp_path):
    env = make_trl(tmp_path)
    assert "guess(number: int)\nGuess the number." in env.system_prompt and "reset" not in env.system_prompt
    assert env.reset(options={"task": env.task})[0] == "Guess!\n\nA number from 0 to 9."
    assert env.step(call(2))[:3] == ("wrong", 0.0, False)
    observation, reward, terminated, _, info = env.step(env.parse(f"<tool_call>{call(3)}</tool_call>").text)
    assert (observation, reward, terminated, info["success"]) == ("right", 1.0, True, True)


@pytest.mark.parametrize("action", [
    "hello", "[]", "3", "{}", '{"name": "reset"}', '{"name": "__init__"}', '{"name": ["guess"]}', '{"name": "guess"}',
    '{"name": "guess", "arguments": [3]}', '{"name": "guess", "arguments": {"number": 3, "more": 1}}', call(12),
    call("three"), "[" * 100_000, "\ud800",
])
def test_a_wrong_call_is_answered_and_invalid(tmp_path, action):
    env = make_trl(tmp_path)
    observation, reward, terminated, _, info = env.step(action)
    assert observation and (reward, terminated, info["valid"]) == (0.0, False, False)
    assert env.step(call(3))[4]["success"]


def test_an_outage_in_a_tool_is_no_answer(tmp_path):
    with pytest.raises(ConnectionError):
        make_trl(tmp_path).step('{"name": "call_home"}')


def test_a_response_without_a_call_ends_the_episode(tmp_path):
    env = make_trl(tmp_path)
    env.step(call(2))
    _, reward, terminated, _, info = env.step("")
    assert (reward, terminated, info["success"], info["valid"]) == (0.0, True, False, True)


def test_the_reward_is_asked_for_at_the_end_also_at_the_turn_limit(tmp_path):
    env = make_trl(tmp_path, "Rated", max_turns=2)
    assert env.step(call(1))[1] == 0.0
    assert env.step(call(1))[1:4] == (1.0, False, True)  # 2 calls / 2
    env.reset(options={"task": env.task})
    env.step(call(1))
    assert env.step("")[1:4] == (0.5, True, False)


@pytest.mark.parametrize("name", ["json:JSONDecodeError", "gymnasium:make"])
def test_a_class_that_does_not_fit_is_named(tmp_path, name):
    with pytest.raises(ValueError, match=name.split(":")[1]):
        envs.make("turngym/TRL-v0", environment=name, rows=guesses(tmp_path))


def test_adapted_environments_travel_between_processes(tmp_path):
    env = pickle.loads(pickle.dumps(make_trl(tmp_path)))
    assert env.step(call(3))[1] == 1.0
