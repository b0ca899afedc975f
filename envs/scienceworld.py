"""ScienceWorld: thirty kinds of elementary-school experiments in a simulated house.

Wang et al., "ScienceWorld: Is your Agent Smarter than a 5th Grader?" (2022). docs/scienceworld.md says what is
reported and how the simulator was made reproducible.
"""

import copy
import hashlib
import json
import math
import re
from collections.abc import Sequence
from typing import Any

import numpy as np

from envs.core import Outcome, Task, TextEnv, check_choice, clean_text
from envs.randomness import pick
from envs.scienceworld_simulator import WORLDS_PER_PROCESS, Reply, World, open_world

VARIATIONS = {
    "boil": 30, "change-the-state-of-matter-of": 30, "chemistry-mix": 32, "chemistry-mix-paint-secondary-color": 36,
    "chemistry-mix-paint-tertiary-color": 36, "find-animal": 300, "find-living-thing": 300,
    "find-non-living-thing": 300, "find-plant": 300, "freeze": 30, "grow-fruit": 126, "grow-plant": 126,
    "identify-life-stages-1": 14, "identify-life-stages-2": 10, "inclined-plane-determine-angle": 168,
    "inclined-plane-friction-named-surfaces": 1386, "inclined-plane-friction-unnamed-surfaces": 162,
    "lifespan-longest-lived": 125, "lifespan-longest-lived-then-shortest-lived": 125, "lifespan-shortest-lived": 125,
    "measure-melting-point-known-substance": 436, "measure-melting-point-unknown-substance": 300, "melt": 30,
    "mendelian-genetics-known-plant": 120, "mendelian-genetics-unknown-plant": 480, "power-component": 20,
    "power-component-renewable-vs-nonrenewable-energy": 20, "test-conductivity": 900,
    "test-conductivity-of-unknown-substances": 600, "use-thermometer": 540,
}
"""The simulator's tasks and how many variations each has."""
SPLITS = {"train": "train", "heldout": "heldout", "dev": "heldout", "test": "test"}
SIMPLIFICATIONS = ("openContainers", "openDoors", "selfWateringFlowerPots", "teleportAction", "noElectricalAction")
LONGEST_ACTION = 300
"""Longer texts are no action; the simulator is not asked."""
NOT_UNDERSTOOD = "No known action matches that input."
MENU_PREFIX = "Ambiguous request: Please enter the number"
MENU_LINE = re.compile(r"^(\d+):", re.MULTILINE)
RESET = "reset task"
PLACEHOLDER = re.compile(r"\bOBJ\b")


def variations(name: str, split: str) -> range:
    """The variations of a task in a split, as the simulator divides them: half, a quarter, the rest."""
    count = VARIATIONS[name]
    first, second = count // 4 * 2, count // 4 * 3
    return {"train": range(first), "heldout": range(first, second), "test": range(second, count)}[split]


class ScienceWorld(TextEnv):
    """An experiment in a house: reach the goal that the task describes. A task's family is its name, one of thirty.

    Success is the simulator's full score of 100. A focus on a wrong object ends the episode with `raw_score` -100,
    score 0 and reward `wrong_focus_reward`. `info` holds `raw_score` (the simulator's, -100 to 100), `raw_return` (the
    sum of its rewards since the start, the paper's return) and `moves` (simulated time).
    """

    action_tags = ("action",)
    stop = ("</action>",)
    blocking, worker_share = True, WORLDS_PER_PROCESS
    system_prompt = (
        "You carry out experiments in a house with several rooms. Each turn, think if you like, then give one action "
        "as <action>action</action>. Actions, where OBJ is an object that you see or carry:\n"
        "look around, look at OBJ, look in OBJ, inventory, task, open OBJ, close OBJ, go to LOCATION, "
        "teleport to LOCATION, pick up OBJ, put down OBJ, move OBJ to OBJ, pour OBJ in OBJ, dunk OBJ in OBJ, mix OBJ, "
        "use OBJ on OBJ, activate OBJ, deactivate OBJ, connect OBJ to OBJ, disconnect OBJ, read OBJ, eat OBJ, "
        "flush OBJ, focus on OBJ, wait, wait1.\n"
        "Focus only on what the task asks for: a focus on anything else fails the task. Where an action is ambiguous, "
        "answer with the number of what you mean.")

    def __init__(self, *, task_names: Sequence[str] | None = None, simplifications: str = "easy", max_turns: int = 200,
                 reward: str = "success", wrong_focus_reward: float = 0.0):
        """`task_names`: the tasks to play, all by default. `simplifications`: `easy` (all that the task allows), or
        some of SIMPLIFICATIONS with commas, or none (""). `reward`: `success` pays 1 on success, `score` each turn the
        points gained over 100. The simulator's own solutions take up to about 180 turns. Raises ImportError where the
        simulator or Java is missing, ValueError for a wrong option."""
        super().__init__(max_turns=max_turns)
        self.task_names = list(VARIATIONS) if task_names is None else list(task_names)
        self.simplifications, self.reward, self.wrong_focus_reward = simplifications, reward, wrong_focus_reward
        self._check()
        self._world: World | None = None

    def _check(self) -> None:
        check_choice("task_names", self.task_names, VARIATIONS)
        parts = [] if self.simplifications in ("", "easy") else self.simplifications.split(",")
        if unknown := [part for part in parts if part not in SIMPLIFICATIONS]:
            raise ValueError(f"simplifications: {', '.join(unknown)!r} is not 'easy' nor one of "
                             f"{', '.join(SIMPLIFICATIONS)} (with commas, no blanks)")
        electrical = [name for name in self.task_names if "power-component" in name or "conductivity" in name]
        if "noElectricalAction" in parts and electrical:
            raise ValueError(f"noElectricalAction leaves {', '.join(electrical)} without a solution: leave them out of "
                             "task_names")
        if self.reward not in ("success", "score"):
            raise ValueError(f"reward is 'success' or 'score', got {self.reward!r}")
        if not math.isfinite(self.wrong_focus_reward):
            raise ValueError(f"wrong_focus_reward is a finite number, got {self.wrong_focus_reward}")

    def tasks(self, split: str) -> Sequence[Task]:
        """The tasks take turns, so that the first of a split are one of each. `dev` is another name of `heldout`."""
        if split not in SPLITS:
            raise ValueError(f"ScienceWorld has the splits {', '.join(SPLITS)}, not {split!r}")
        lists = {name: variations(name, SPLITS[split]) for name in self.task_names}
        return [Task(key=f"{name}-{numbers[turn]}", split=SPLITS[split], env_id=self.env_id, family=name,
                     data={"task": name, "variation": numbers[turn]})
                for turn in range(max(map(len, lists.values())))
                for name, numbers in lists.items() if turn < len(numbers)]

    def _reset(self, task: Task, rng: np.random.Generator) -> str:
        self._seed = int(rng.integers(2**47))
        self._done: list[tuple[str, ...]] = []
        """The inputs that changed the world; one that was ambiguous stands with its answers."""
        self._open: tuple[str, ...] = ()
        """Inputs that the simulator answered with a question: which of several readings is meant."""
        self._choices: list[str] = []
        reply = self._load()
        self._first_score = self._score = reply.score
        return reply.observation

    def _load(self) -> Reply:
        if self._world is None or not self._world.alive:
            self._world = open_world()
        self._moves = 0
        return self._world.load(*self._address())

    def _address(self) -> tuple[str, int, str, int]:
        return self.task.data["task"], self.task.data["variation"], self.simplifications, self._seed

    def _step(self, action: str) -> Outcome:
        text = " ".join(clean_text(action).split())
        if {"reset", "task"} <= set(re.findall(r"[a-z]+", text.lower())):
            return self._outcome("The task cannot be reset.", valid=False)
        if len(text) > LONGEST_ACTION or not text:
            return self._outcome(NOT_UNDERSTOOD, valid=False)
        self._ensure_world()
        if self._open and text not in self._choices:
            self._settle("", self._send(""))  # takes the question back, which takes time
        reply = self._send(text)
        if reply.failed:
            self._open, self._choices = (), []
            self._rebuild()
            return self._outcome("Nothing happens.", valid=False)
        if reply.observation.startswith(MENU_PREFIX):
            self._open, self._choices = (*self._open, text), MENU_LINE.findall(reply.observation)
            return self._outcome(reply.observation)
        self._settle(text, reply)
        return self._judge(reply)

    def _settle(self, text: str, reply: Reply) -> None:
        """Note an input that left no question open; one that took no time left no trace in the world."""
        if reply.moves != self._moves:
            self._done.append((*self._open, text))
        self._open, self._choices, self._moves = (), [], reply.moves

    def _judge(self, reply: Reply) -> Outcome:
        gained, self._score = reply.score - self._score, reply.score
        success, wrong_focus = reply.completed and reply.score == 100, reply.score < 0
        if wrong_focus:
            reward = self.wrong_focus_reward
        elif self.reward == "score":
            reward = gained / 100
        else:
            reward = float(success)
        valid = not reply.observation.startswith((NOT_UNDERSTOOD, "ERROR"))
        return self._outcome(reply.observation, reward=reward, terminated=reply.completed or wrong_focus,
                             success=success, valid=valid)

    def _outcome(self, observation: str, **fields: Any) -> Outcome:
        info = {"raw_score": self._score, "raw_return": self._score - self._first_score, "moves": self._moves}
        return Outcome(observation=observation, score=max(0, self._score) / 100, info=info, **fields)

    def _send(self, text: str) -> Reply:
        # The seed counts what changed the world: two ways to a state that differ in looks alone go on alike.
        return self._world.step(text, self._seed + 1 + len(self._done))

    def _ensure_world(self) -> None:
        """Build the current state again where the world stayed behind: after pickling, a fork, a Java process's end."""
        if self._world is None or not self._world.alive:
            self._rebuild()

    def _rebuild(self) -> None:
        done, self._done = self._done, []
        self._load()
        for texts in done:
            for text in texts:
                self._moves = self._send(text).moves
            self._done.append(texts)
        for text in self._open:
            self._send(text)

    def gold(self, rng: np.random.Generator) -> list[str]:
        """The simulator's own solution, up to where the task is completed. `rng` is not used: there is one.

        Raises LookupError where it does not complete the task, or not within `max_turns`.
        """
        self._ensure_world()
        twin = copy.copy(self)
        twin._world = self._world
        plan = self._world.gold_path(*self._address())
        # Fruit grows by chance, here perhaps later than in the simulator's own run: its focus on something that is not
        # there yet is left out, and its last one, with the answer to what the simulator asks then, comes once more.
        last = max((turn for turn, action in enumerate(plan) if action.startswith("focus on")), default=len(plan))
        plan += plan[last:last + 2]
        twin.max_turns = len(plan)
        twin.reset(options={"task": self.task})
        played = []
        for action in plan:
            moves = twin._moves
            _, _, terminated, _, info = twin.step(action)
            if info["valid"] or info["moves"] != moves:
                played.append(action)
            if terminated:
                break
        self._world = twin._world
        self._rebuild()
        if not info["success"] or len(played) > self.max_turns:
            raise LookupError(f"the simulator's own solution of {self.task.key} reaches a score of {info['raw_score']} "
                              f"with {len(played)} actions, with max_turns={self.max_turns}")
        return [f"<action>{action}</action>" for action in played]

    def random_action(self, rng: np.random.Generator) -> str:
        """One of the forms of actions, each as likely, about objects in sight; while a question is open, a number. The
        list of valid actions would take four times as long."""
        self._ensure_world()
        if self._choices:
            return f"<action>{pick(rng, self._choices)}</action>"
        forms, objects = self._world.vocabulary()
        form = pick(rng, [form for form in forms if form != RESET])
        return f"<action>{PLACEHOLDER.sub(lambda _: pick(rng, objects), form)}</action>"

    def admissible_actions(self) -> list[str]:
        """The simulator's list of valid actions, hundreds to thousands; while a question is open, its numbers."""
        self._ensure_world()
        return self._choices or [action for action in self._world.valid_actions() if action != RESET]

    def state_key(self) -> str:
        return hashlib.sha256(json.dumps([self.task.key, self._done, self._open]).encode()).hexdigest()[:16]

    def close(self) -> None:
        if self._world is not None:
            self._world.close()
            self._world = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_world": None}
