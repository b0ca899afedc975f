"""What every text environment gets from its base class, and `envs.make`."""

import gymnasium
import numpy as np
import pytest

import envs
from envs import LazyTasks, Outcome, SingleTurnEnv, Task, TextEnv


class Count(TextEnv):
    """Say +1 until three."""

    max_turns = 3

    def tasks(self, split):
        return [Task(key=f"task {i}", data={"goal": 3}) for i in range(5)]

    def _reset(self, task, rng):
        self.count = 0
        return "0"

    def _step(self, action):
        self.count += action == "+1"
        success = self.count == self.task.data["goal"]
        return Outcome(observation=str(self.count), reward=float(success), terminated=success, success=success,
                       valid=action == "+1")


@pytest.fixture
def env():
    env = Count()
    env.reset(seed=0)
    return env


def test_the_last_allowed_turn_is_applied_and_can_solve(env):
    steps = [env.step("+1") for _ in range(3)]
    # The third step reports the count 3, not the next episode's 0; solved in time, it is not truncated.
    assert [step[:4] for step in steps] == [("1", 0, False, False), ("2", 0, False, False), ("3", 1, True, False)]
    assert steps[-1][4]["success"]


def test_the_turn_limit_is_neither_success_nor_termination(env):
    steps = [env.step(action) for action in ("+1", "-1", "+1")]
    assert steps[-1][:4] == ("2", 0, False, True)
    assert steps[-1][4]["success"] is False and steps[-1][4]["turn"] == 3


def test_a_step_outside_an_episode_needs_a_reset(env):
    with pytest.raises(gymnasium.error.ResetNeeded, match="reset"):
        Count().step("+1")
    for _ in range(3):
        env.step("+1")
    with pytest.raises(gymnasium.error.ResetNeeded, match="reset"):
        env.step("+1")


def test_only_text_is_an_action(env):
    with pytest.raises(TypeError, match="int"):
        env.step(1)


def test_restore_returns_to_the_snapshot_and_leaves_it_as_it_was(env):
    env.step("+1")
    here, key = env.snapshot(), env.state_key()
    for _ in range(2):
        assert env.step("+1")[0] == "2"
        assert env.state_key() != key
        env.restore(here)
        assert env.state_key() == key


class Copied(Count):
    """Counts in a number that can be copied, and how often it began."""

    began = 0

    def _reset(self, task, rng):
        self.began += 1
        return super()._reset(task, rng)

    def copy_state(self):
        return self.count

    def load_state(self, state):
        self.count = state


def test_a_copied_state_is_restored_without_playing_again(env):
    env, other = Copied(), Copied()
    task, *_ = env.tasks("train")
    env.reset(options={"task": task})
    env.step("+1")
    here = env.snapshot()
    while not any(env.step("+1")[2:4]):
        pass
    end = env.snapshot()
    for one, began in ((env, 1), (other, 1)):  # the other has not begun this task
        one.restore(here)
        assert one.step("+1")[0] == "2" and one.step("+1")[4]["turn"] == 3 and one.began == began
        one.restore(end)
        with pytest.raises(gymnasium.error.ResetNeeded):
            one.step("+1")


def test_state_keys_tell_apart_what_was_done(env):
    keys = set()
    for actions in ([], ["a"], ["a\nb"], ["a", "b"], ["\ud800"], ["a", ""]):
        env.reset(options={"task": env.task})
        for action in actions:
            env.step(action)
        keys.add(env.state_key())
    assert len(keys) == 6


def test_a_group_of_environments_plays_the_task_it_is_given():
    tasks = Count().tasks("train")
    assert [Count().reset(options={"task": tasks[2]})[1]["task_key"] for _ in range(4)] == ["task 2"] * 4
    env = Count()
    assert [env.reset(options={"task": task})[1]["task_key"] for task in tasks] == [task.key for task in tasks]


def test_lazy_tasks_are_made_when_asked_for():
    made = []
    tasks = LazyTasks(10**9, lambda i: made.append(i) or Task(key=str(i)))
    assert [tasks[5].key, tasks[-1].key, tasks[2:4][1].key] == ["5", "999999999", "3"]
    assert made == [5, 999_999_999, 2, 3]
    with pytest.raises(IndexError):
        tasks[10**9]


def test_a_single_turn_environment_scores_one_answer():
    class Quiz(SingleTurnEnv):
        def tasks(self, split):
            return [Task(key="q", data={"question": "1+1?"})]

        def score(self, task, answer):
            return {"2": 1.0, "two-ish": 0.5, "?": None, "broken": 2.0}.get(answer, 0.0)
    env = Quiz()
    found = {}
    for answer in ("2", "two-ish", "?", "3"):
        assert env.reset(seed=0)[0] == "1+1?"
        _, reward, terminated, truncated, info = env.step(answer)
        assert terminated and not truncated
        found[answer] = (reward, info["success"], info["score"], info["scorable"])
    assert found == {"2": (1, True, 1, True), "two-ish": (0.5, False, 0.5, True), "?": (0, False, 0, False),
                     "3": (0, False, 0, True)}
    env.reset(seed=0)
    with pytest.raises(ValueError, match="q"):
        env.step("broken")


def test_make_names_the_nearest_id():
    with pytest.raises(gymnasium.error.NameNotFound, match="Countdown"):
        envs.make("turngym/Countdwn-v0")
    with pytest.raises(gymnasium.error.NamespaceNotFound, match="turngym"):
        envs.make("turngim/Countdown-v0")
    with pytest.raises(gymnasium.error.VersionNotFound, match="v0"):
        envs.make("turngym/Countdown-v9")


def test_make_takes_environments_with_text_or_discrete_actions_only():
    with pytest.raises(TypeError, match=r"Pendulum-v1.*discrete.*TextEnv"):
        envs.make("Pendulum-v1")


def test_make_passes_options_and_knows_its_id():
    env = envs.make("turngym/Countdown-v0", tool_rounds=2)
    assert (env.max_turns, env.env_id) == (3, "turngym/Countdown-v0")
    env.reset(seed=0)
    assert env.task.env_id == "turngym/Countdown-v0"
    with pytest.raises(TypeError, match="rounds"):
        envs.make("turngym/Countdown-v0", rounds=2)


class Returns(Count):
    """Returns what it is told to."""

    def __init__(self, returned, first="0"):
        super().__init__()
        self.returned, self.first = returned, first

    def _reset(self, task, rng):
        return self.first

    def _step(self, action):
        return self.returned


@pytest.mark.parametrize("returned", [None, ("ok", 0.0, False, False, {}), "ok", 1.0])
def test_a_step_that_returns_no_outcome_is_named(returned):
    env = Returns(returned)
    env.reset(seed=0)
    with pytest.raises(TypeError, match=r"Returns\._step must return an envs\.Outcome, got"):
        env.step("a")


@pytest.mark.parametrize("first", [None, 3, b"0", ("0", {})])
def test_a_reset_that_returns_no_text_is_named(first):
    with pytest.raises(TypeError, match=r"Returns\._reset must return the first observation, a text; got"):
        Returns(Outcome(), first=first).reset(seed=0)


@pytest.mark.parametrize("fields, error, message", [
    ({"observation": None}, TypeError, "an observation is text, got None"),
    ({"observation": 3}, TypeError, "an observation is text, got 3"),
    ({"reward": float("nan")}, ValueError, "a finite number, got nan"),
    ({"reward": -float("inf")}, ValueError, "a finite number, got -inf"),
    ({"reward": "lots"}, TypeError, "real number"), ({"reward": None}, TypeError, "real number"),
    ({"score": 17.0}, ValueError, "between 0 and 1, got 17"), ({"score": -100}, ValueError, "between 0 and 1"),
    ({"score": float("nan")}, ValueError, "between 0 and 1, got nan")])
def test_an_outcome_is_never_out_of_range(fields, error, message):
    with pytest.raises(error, match=message):
        Outcome(**fields)


def test_rewards_may_be_any_number():
    for reward in (-100, 10.5, True, np.float32(0.5), 1e300):
        assert Outcome(reward=reward).reward == reward


@pytest.mark.parametrize("key", [3, None, ("a", 1), b"a"])
def test_a_tasks_key_is_text(key):
    with pytest.raises(TypeError, match="a task's key is text, got"):
        Task(key=key)


@pytest.mark.parametrize("name", ["action_tags", "stop"])
def test_a_tuple_that_lost_its_comma_is_named(name):
    # ("say") is the text "say", of which every letter would be a tag.
    with pytest.raises(TypeError, match=rf"Forgetful\.{name} is one text, 'say': write a tuple, \('say',\)"):
        type("Forgetful", (Count,), {name: ("say")})()


def test_whatever_a_constructor_raises_is_one_error_of_make():
    class Engineless(Count):
        def __init__(self):
            raise RuntimeError("no engine here")

    class Unfinished(Count):
        def __init__(self):
            """Without super().__init__()."""
    for entry, message in ((Engineless, "RuntimeError: no engine here"), (Unfinished, "action space")):
        gymnasium.register("broken/Broken-v0", entry_point=entry)
        with pytest.raises(ValueError, match=f"broken/Broken-v0 cannot be made: .*{message}"):
            envs.make("broken/Broken-v0")
        del gymnasium.registry["broken/Broken-v0"]


def endless():
    values = []
    values.append(values)
    return values


UNWRITABLE = [object(), {1, 2}, b"bytes", 1j, float("nan"), float("inf"), [np.nan], {("a", "b"): 1}, {"deep": [set()]},
              np.array([np.inf]), endless()]


@pytest.mark.parametrize("value", UNWRITABLE, ids=[f"{type(value).__name__} {i}" for i, value in enumerate(UNWRITABLE)])
def test_what_json_cannot_say_is_named_by_class_and_key_where_it_is_made(value):
    class Odd(Count):
        def _step(self, action):
            return Outcome(info={"fine": 1, "board": value})
    env = Odd()
    env.reset(seed=0)
    with pytest.raises(TypeError, match=r"Odd\._step: info\['board'\] cannot be written as JSON .*: give text"):
        env.step("+1")
    with pytest.raises(TypeError, match=r"Count: task 'x': data\['board'\] cannot be written as JSON"):
        Count().reset(options={"task": Task(key="x", data={"board": value})})


@pytest.mark.parametrize("value", [None, True, 3, 0.5, "text \ud800", [1, ["two"], {"three": 3}], (1, 2), np.int64(3),
                                   np.bool_(True), np.zeros((2, 2)), {}])
def test_what_json_knows_and_numpys_numbers_may_be_info(value):
    class Fine(Count):
        def _step(self, action):
            return Outcome(info={"board": value})
    env = Fine()
    env.reset(seed=0)
    assert env.step("+1")[4]["board"] is value


@pytest.mark.parametrize("place", ["class", "constructor", "reset"])
def test_the_system_prompt_is_cleaned_as_observations_are(place):
    dirty, clean = "Say \ud800\x00yes.", "Say ?yes."

    class Prompted(Count):
        system_prompt = dirty if place == "class" else ""

        def __init__(self):
            super().__init__()
            if place == "constructor":
                self.system_prompt = dirty

        def _reset(self, task, rng):
            if place == "reset":
                self.system_prompt = dirty
            return dirty
    env = Prompted()
    assert env.reset(seed=0)[0] == env.system_prompt == clean


def test_a_system_prompt_may_be_a_property():
    env = type("Prompted", (Count,), {"system_prompt": property(lambda self: f"Reach {self.task.data['goal']}.")})()
    env.reset(seed=0)
    assert env.system_prompt == "Reach 3."
