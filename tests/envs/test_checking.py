"""Every property that `check_text_env` checks can be seen to hold and to be broken."""

import itertools
import random
import re
import socket
import textwrap

import gymnasium
import numpy as np
import pytest

import envs
from envs import Outcome, Task, TextEnv
from envs.properties import PROPERTIES
from scripts import check_env

KEPT = []
"""What the leaking environments below never give back."""
COUNTER = itertools.count()


class Walk(TextEnv):
    """Healthy: walk from 0 to the task's goal, one step per turn."""

    system_prompt = "Reply <action>up</action> or <action>down</action>."
    max_turns = 6
    action_tags = ("action",)
    sizes = {"train": range(2, 6), "test": range(-5, -1)}  # noqa: RUF012

    def tasks(self, split):
        if split not in self.sizes:
            raise ValueError(f"no split {split!r}")
        return [Task(key=f"{goal:+d}", split=split, data={"goal": goal}) for goal in self.sizes[split]]

    def _reset(self, task, rng):
        self.place = 0
        return f"You are at 0. Go to {task.data['goal']}."

    def _step(self, action):
        if action not in ("up", "down"):
            return Outcome(observation="No such action.", valid=False)
        self.place += 1 if action == "up" else -1
        success = self.place == self.task.data["goal"]
        return Outcome(observation=f"You are at {self.place}.", reward=float(success), terminated=success,
                       success=success)

    def admissible_actions(self):
        return ["up", "down"]

    def gold(self, rng):
        goal = self.task.data["goal"]
        return [f"<action>{'up' if goal > 0 else 'down'}</action>"] * abs(goal)


def results(env, **options):
    return {result.name: result for result in envs.check_text_env(env, **options)}


def test_a_healthy_environment_passes():
    found = results(Walk())
    assert not [result for result in found.values() if not result.ok]
    assert list(found) == list(PROPERTIES)
    # An instance cannot be made again in another process.
    assert [name for name, result in found.items() if result.skipped] == ["other processes"]


def test_what_does_not_apply_is_skipped_and_says_why():
    class Bare(Walk):
        sizes = {"train": range(2, 6)}  # noqa: RUF012
        admissible_actions, gold = TextEnv.admissible_actions, TextEnv.gold
    found = results(Bare())
    for name in ("admissible actions", "gold plan", "splits disjoint", "other processes", "parse", "random agent"):
        assert found[name].skipped and found[name].ok and found[name].detail


# One broken environment per property


class WrongSpace(Walk):
    def __init__(self):
        super().__init__()
        self.observation_space = gymnasium.spaces.Discrete(3)


class SeedIgnored(Walk):
    def reset(self, *, seed=None, options=None):
        return super().reset(seed=next(COUNTER) if seed is not None else None, options=options)


class OneTaskForAllSeeds(Walk):
    def reset(self, *, seed=None, options=None):
        return super().reset(seed=0 if seed is not None else None, options=options)


class NextTask(Walk):
    def reset(self, *, seed=None, options=None):
        tasks = self.tasks("train")
        return super().reset(seed=seed, options={"task": tasks[next(COUNTER) % len(tasks)]})


class DrawsFromRandom(Walk):
    def _step(self, action):
        outcome = super()._step(action)
        return Outcome(observation=f"{outcome.observation} {random.random()}", reward=outcome.reward,
                       terminated=outcome.terminated, success=outcome.success, valid=outcome.valid)


class DrawsFromNumpy(Walk):
    def _reset(self, task, rng):
        return f"{super()._reset(task, rng)} {np.random.randint(1000)}"


class SeedsRandom(Walk):
    def _reset(self, task, rng):
        random.seed(1)
        return super()._reset(task, rng)


class OneKeyTwoWorlds(Walk):
    def tasks(self, split):
        return [Task(key=task.key[-1], split=split, data=task.data) for task in super().tasks(split)]


class SplitDecides(Walk):
    def _reset(self, task, rng):
        return f"{super()._reset(task, rng)} ({task.split})"


class SharedTask(Walk):
    sizes = {"train": range(2, 6), "test": range(5, 8)}  # noqa: RUF012


class DataNoJson(Walk):
    def tasks(self, split):
        return [Task(key=task.key, data={**task.data, "walls": {1, 2}}) for task in super().tasks(split)]


class KeyTwiceInTest(Walk):
    def tasks(self, split):
        return super().tasks(split) * (2 if split == "test" else 1)


class NanReward(Walk):
    def _step(self, action):
        return Outcome(observation="?", reward=float("nan"))


class ScoreOutOfRange(Walk):
    def _step(self, action):
        return Outcome(observation="?", score=17.0)


class CutOffIsSuccess(Walk):
    def _step(self, action):
        return Outcome(observation="?", success=len(self._actions) == self.max_turns)


class NoLimit(Walk):
    def step(self, action):
        observation, reward, terminated, _, info = super().step(action)
        self._over = terminated
        return observation, reward, terminated, False, info


class InfoLost(Walk):
    def _info(self, outcome):
        return {"success": outcome.success}


class RestartsAtTheEnd(Walk):
    def step(self, action):
        observation, *rest = super().step(action)
        return (self._reset(self.task, None) if rest[1] or rest[2] else observation), *rest


class PlaysOn(Walk):
    def step(self, action):
        self._over = False
        return super().step(action)


class SpanAside(Walk):
    def parse(self, response):
        span = super().parse(response)
        return envs.ActionSpan(span.text, span.start + 1, span.end + 1)


class ListsTooMuch(Walk):
    def admissible_actions(self):
        return ["up", "down", "left"]


class GoldTooShort(Walk):
    def gold(self, rng):
        return super().gold(rng)[1:]


class GoldTooLong(Walk):
    def gold(self, rng):
        return [*super().gold(rng), "<action>up</action>"]


class GoldStumbles(Walk):
    def gold(self, rng):
        return ["<action>jump</action>", *super().gold(rng)]


class AnythingWins(Walk):
    def _step(self, action):
        return Outcome(terminated=True, success=True, reward=1.0)


class RestoreForgets(Walk):
    def restore(self, snapshot):
        self.reset(options={"task": snapshot.task})


class RestoreKeepsThePlace(Walk):
    def snapshot(self):
        return self.task, list(self._actions)

    def restore(self, snapshot):
        self._actions, self._over = list(snapshot[1]), False


class NotPicklable(Walk):
    def _reset(self, task, rng):
        self.words = iter(lambda: "up", None)
        return super()._reset(task, rng)


class PickleForgets(Walk):
    def __getstate__(self):
        return {**self.__dict__, "place": 0}


class SharedPlace(Walk):
    places = [0]  # noqa: RUF012

    @property
    def place(self):
        return self.places[0]

    @place.setter
    def place(self, value):
        self.places[0] = value


class ClosesOnce(Walk):
    def close(self):
        del self.task


class Leaks(Walk):
    def _reset(self, task, rng):
        KEPT.append(b"\x01" * 2_000_000)
        return super()._reset(task, rng)


class LeavesFilesOpen(Walk):
    def _reset(self, task, rng):
        KEPT.append(socket.socket())
        return super()._reset(task, rng)


class Crashes(Walk):
    def _step(self, action):
        action.encode("ascii")
        return super()._step(action)


class NotText(Walk):
    def _step(self, action):
        return Outcome(observation=None) if "\n" in action else super()._step(action)


class NotCleaned(Walk):
    def step(self, action):
        return action, *super().step(action)[1:]


class OddTextNotCounted(Walk):
    def step(self, action):
        values = super().step(action)
        if "\n" in action:
            self._actions.pop()
            values[4]["turn"] -= 1
        return values


BROKEN = [
    ("gymnasium", WrongSpace), ("reset by seed", SeedIgnored), ("reset by seed", OneTaskForAllSeeds),
    ("reset to a task", NextTask), ("determinism", DrawsFromRandom), ("determinism", DrawsFromNumpy),
    ("global generators", SeedsRandom), ("global generators", DrawsFromNumpy), ("keys name worlds", OneKeyTwoWorlds),
    ("keys name worlds", SplitDecides), ("keys name worlds", DataNoJson), ("splits disjoint", SharedTask),
    ("splits disjoint", KeyTwiceInTest),
    ("step values", NanReward), ("step values", ScoreOutOfRange), ("step values", CutOffIsSuccess),
    ("step values", NoLimit), ("step values", InfoLost), ("terminal observation", RestartsAtTheEnd),
    ("step after the end", PlaysOn), ("parse", SpanAside), ("admissible actions", ListsTooMuch),
    ("gold plan", GoldTooShort), ("gold plan", GoldTooLong), ("gold plan", GoldStumbles),
    ("random agent", AnythingWins), ("empty agent", AnythingWins), ("snapshot and restore", RestoreForgets),
    ("snapshot and restore", RestoreKeepsThePlace), ("pickling", NotPicklable), ("pickling", PickleForgets),
    ("side by side", SharedPlace), ("close", ClosesOnce), ("no leak", Leaks), ("no leak", LeavesFilesOpen),
    ("hostile text", Crashes), ("hostile text", NotText), ("hostile text", NotCleaned),
    ("hostile text", OddTextNotCounted),
]


@pytest.mark.parametrize("name, environment", BROKEN)
def test_a_broken_environment_fails_its_property(name, environment):
    state = random.getstate()
    found = results(environment())[name]
    KEPT.clear()
    random.setstate(state)
    assert not found.ok and not found.skipped and found.detail


def test_an_exception_is_reported_with_its_line_in_the_environments_file():
    broken = type("Broken", (Walk,), {"_step": lambda self, action: {}[action]})
    assert re.search(r"KeyError: .* \(test_checking\.py, line \d+\)$", results(broken())["determinism"].detail)
    # A violation needs none: what it says is about the environment, not about a line.
    assert "line" not in results(GoldTooShort())["gold plan"].detail


def test_every_property_has_a_broken_environment():
    assert {name for name, _ in BROKEN} | {"other processes"} == set(PROPERTIES)


@pytest.mark.parametrize("tasks", [lambda self, split: [], lambda self, split: 1 / 0])
def test_an_environment_without_tasks_fails(tasks):
    assert [result.ok for result in envs.check_text_env(type("NoTasks", (Walk,), {"tasks": tasks})())] == [False]


# An environment of one's own, in a file outside the project

GUESS = '''
import gymnasium
import envs


class Guess(envs.TextEnv):
    """Guess a number with hints."""

    system_prompt = "Guess the number from 0 to 9. Reply <guess>number</guess>."
    action_tags, max_turns, stop = ("guess",), 5, ("</guess>",)

    def tasks(self, split):
        if split != "train":
            raise ValueError(f"Guess has no split {split!r}")
        return [envs.Task(key=str(n), data={"secret": n}) for n in range(10)]

    def _reset(self, task, rng):
        return "Guess!"

    def _step(self, action):
        secret = self.task.data["secret"]
        if not action.isdecimal() or len(action) > 1:
            return envs.Outcome(observation="A number from 0 to 9, please.", valid=False)
        right = int(action) == secret
        return envs.Outcome(observation="Right." if right else "Higher." if int(action) < secret else "Lower.",
                            reward=float(right), terminated=right, success=right)

    def admissible_actions(self):
        return [str(n) for n in range(10)]

    def gold(self, rng):
        return [f"<guess>{self.task.data['secret']}</guess>"]


gymnasium.register("me/Guess-v0", entry_point="my_env:Guess")
'''


@pytest.fixture
def own_file(tmp_path, monkeypatch):
    (tmp_path / "my_env.py").write_text(GUESS)
    broken = GUESS.replace('return "Guess!"', 'return "Guess! " + str({"a", "b", "c", "d", "e", "f"})')
    broken = broken.replace("my_env", "my_other_env").replace("me/Guess", "me/Other")
    (tmp_path / "my_other_env.py").write_text(textwrap.dedent(broken))
    monkeypatch.syspath_prepend(tmp_path)


@pytest.mark.usefixtures("own_file")
def test_an_environment_of_ones_own_passes():
    env = envs.make("my_env:me/Guess-v0", max_turns=7)
    assert (env.max_turns, env.env_id) == (7, "my_env:me/Guess-v0")
    found = results("my_env:me/Guess-v0")
    assert not [result for result in found.values() if not result.ok]
    assert [name for name, result in found.items() if result.skipped] == ["splits disjoint"]


@pytest.mark.usefixtures("own_file")
def test_an_instance_made_by_its_id_is_checked_in_other_processes_too():
    for env, skipped in ((envs.make("my_env:me/Guess-v0", max_turns=7), False),
                         (gymnasium.make("my_env:me/Guess-v0"), True)):
        found = results(env, episodes=3)
        assert all(result.ok for result in found.values()) and found["other processes"].skipped == skipped
    with pytest.raises(TypeError, match="max_turns"):
        results(envs.make("my_env:me/Guess-v0"), max_turns=7)


@pytest.mark.usefixtures("own_file")
def test_the_order_of_a_set_is_found_by_another_process():
    found = results("my_other_env:me/Other-v0")
    assert not found["other processes"].ok and found["determinism"].ok


@pytest.mark.usefixtures("own_file")
def test_the_script_prints_a_line_per_property_and_fails_on_a_failure(capsys):
    assert check_env.main(["my_env:me/Guess-v0", "--option", "max_turns=6"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == len(PROPERTIES) and all(line.startswith(("ok", "skip")) for line in lines)
    assert check_env.main(["my_other_env:me/Other-v0"]) == 1
    assert [line for line in capsys.readouterr().out.splitlines() if line.startswith("FAIL other processes")]


@pytest.mark.parametrize("arguments, message", [
    (["turngym/Cuntdown-v0"], "Did you mean: `Countdown`"), (["no_such_file:me/Guess-v0"], "no_such_file"),
    (["Pendulum-v1"], "TextEnv"), (["turngym/Countdown-v0", "--option", "bogus=1"], "bogus"),
    (["turngym/Countdown-v0", "--option", "max_numbers=9"], "max_numbers"),
    (["turngym/Countdown-v0", "--episodes", "0"], "episodes"),
    (["turngym/Math-v0", "--option", "data=no_such.jsonl"], "no_such.jsonl"),
])
def test_what_cannot_be_made_is_named(arguments, message, capsys):
    assert check_env.main(arguments) == 2
    assert message in capsys.readouterr().err


@pytest.mark.usefixtures("own_file")
def test_each_line_is_printed_as_its_property_ends_and_an_interrupt_ends_with_130(monkeypatch, capsys):
    def interrupted(case):
        raise KeyboardInterrupt
    monkeypatch.setitem(PROPERTIES, "determinism", interrupted)
    assert check_env.main(["my_env:me/Guess-v0"]) == 130
    shown = capsys.readouterr()
    assert [line.split()[0] for line in shown.out.splitlines()] == ["ok"] * list(PROPERTIES).index("determinism")
    assert shown.err == "interrupted before the last property\n"


def test_a_task_set_that_fails_is_a_line_too(capsys):
    heard = []
    broken = type("NoTasks", (Walk,), {"tasks": lambda self, split: 1 / 0})()
    assert envs.check_text_env(broken, on_result=heard.append) == heard
    assert [result.name for result in heard] == ["tasks"]
