"""ALFWorld's games on TextWorld's own engine: what the state engine here is compared with, in tests and benchmarks.

TextWorld is not thread-safe, and each of its environments keeps some 4 MB of the process for good: use one at a time.
"""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from envs.alfworld_games import goal_text, package_folder
from envs.alfworld_pddl import parse
from envs.alfworld_plan import plan
from envs.alfworld_world import Game

CONSTANTS = {"fridgetype": "rtype", "microwavetype": "rtype", "sinkbasintype": "rtype", "knifetype": "otype",
             "butterknifetype": "otype"}
"""Names that the domain's actions use and every problem must declare."""


def game_file(game: Game) -> dict[str, Any]:
    """A generated game as ALFWorld's `game.tw-pddl` holds it."""
    folder = package_folder() / "data"
    domain = (folder / "alfred.pddl").read_text(encoding="utf-8")
    grammar = (folder / "alfred.twl2").read_text(encoding="utf-8")
    predicates = next(part for part in parse(domain)[1:] if part[0] == ":predicates")
    types = {name: words[2::3] for name, *words in predicates[1:]}
    objects = CONSTANTS | {word: kind for name, rows in game.facts.items() for row in rows
                           for word, kind in zip(row, types[name])}
    declared = "\n".join(f"{word} - {kind}" for word, kind in sorted(objects.items()))
    facts = "\n".join(f"({' '.join((name, *row))})" for name, rows in sorted(game.facts.items())
                      for row in sorted(rows))
    goal = goal_text(game.family, game.target.removesuffix("type"), game.destination.removesuffix("type"))
    return {"pddl_domain": domain, "grammar": grammar.replace("UNKNOWN GOAL", game.task), "solvable": True,
            "walkthrough": plan(game, np.random.default_rng(0)),
            "pddl_problem": f"(define (problem generated) (:domain alfred) (:objects {declared})\n"
                            f"(:init (= (total-cost) 0)\n{facts})\n{goal})"}


class TextWorldGame:
    """One game after another on one TextWorld engine, with ALFWorld's names for things."""

    def __init__(self):
        with _process_kept():
            from alfworld.agents.environment.alfred_tw_env import AlfredDemangler
            from textworld import EnvInfos
            from textworld.envs.pddl import PddlEnv
            self._engine = AlfredDemangler(PddlEnv(EnvInfos(admissible_commands=True, won=True)))

    def reset(self, game: dict[str, Any] | Path) -> str:
        """Start a game, given as `game_file` makes it or by its file, and return its first text."""
        with _process_kept():
            self._engine.load(game if isinstance(game, dict) else str(game))
            self._state = self._engine.reset()
        return self._state.feedback

    def act(self, command: str) -> str:
        """Carry out a command and return what happens."""
        self._state, _, _ = self._engine.step(command)
        return self._state.feedback

    @property
    def actions(self) -> list[str]:
        """The admissible commands, sorted."""
        return self._state["admissible_commands"]

    @property
    def won(self) -> bool:
        """Whether the goal holds."""
        return self._state["won"]


@contextmanager
def _process_kept() -> Iterator[None]:
    """Undo what importing ALFWorld and loading a game do to the process: a variable, and the program's arguments."""
    arguments, data = sys.argv, os.environ.get("ALFWORLD_DATA")
    os.environ["ALFWORLD_DATA"] = data or str(package_folder())  # else it makes a folder in the home
    try:
        yield
    finally:
        sys.argv = arguments
        if data is None:
            del os.environ["ALFWORLD_DATA"]
