"""ALFWorld: household tasks in text. Find things, open, carry, clean, heat, cool and put them where they belong."""

import hashlib
import json
import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from envs.alfworld_games import FAMILIES, make_game, original_family, original_games, package_folder, read_game, scenes
from envs.alfworld_pddl import Fact
from envs.alfworld_plan import plan
from envs.alfworld_world import NOTHING, Game, World, translate
from envs.core import LazyTasks, Outcome, Task, TextEnv, check_choice
from envs.randomness import pick, stable_generator

SIZES = {"train": 60_000, "seen": 600, "unseen": 600}
"""Generated games of each split."""
ALIASES = {"heldout": "seen", "test": "unseen", "valid_seen": "seen", "valid_unseen": "unseen"}
FOLDERS = {"train": "train", "seen": "valid_seen", "unseen": "valid_unseen"}
"""Folders of the original games, in `json_2.1.1`."""
RULES = """\
You act in a household through text. Closed receptacles must be opened to see inside. You can carry one object.
Clean at a sinkbasin, heat at a microwave, cool at a fridge. To look at a thing under a lamp, hold it and use the lamp.
Actions: go to R, open R, close R, take O from R, move O to R, clean O with R, heat O with R, cool O with R, use O, \
slice O with O, examine R, inventory, look.
Reply with one action, as in <action>go to desk 1</action>."""


class ALFWorld(TextEnv):
    """One action a turn, as `<action>go to desk 1</action>`; reward 1 when the goal holds, which ends the episode.

    Games are generated from AI2-THOR's floor plans: `train` (60,000) and `seen` (600) play in the 96 rooms of training,
    `unseen` (600) in the other 24; `heldout` is `seen`, `test` is `unseen`. The families take turns: pick, look, clean,
    heat, cool, pick two.
    """

    action_tags = ("action",)
    stop = ("</action>",)
    max_turns = 50

    def __init__(self, *, data: str | None = None, max_turns: int = 50, list_actions: bool = True,
                 families: Sequence[str] = tuple(FAMILIES), demonstration_searches: int = 0):
        """`data`: a folder with ALFWorld's original `json_2.1.1`, whose games are then played; by default that of the
        variable ALFWORLD_DATA, else games are generated. `list_actions`: observations end with the actions that are
        possible. `families`: the kinds of games that are played. `demonstration_searches`: most receptacles that `gold`
        looks into in vain before it fetches an object.

        Raises ImportError without ALFWorld's package and FileNotFoundError for a folder without games.
        """
        super().__init__(max_turns=max_turns)
        if demonstration_searches < 0:
            raise ValueError(f"demonstration_searches must be at least 0, got {demonstration_searches}")
        check_choice("families", families, FAMILIES)
        package_folder()
        self.folder = _data_folder(data or os.environ.get("ALFWORLD_DATA"))
        self.list_actions, self.demonstration_searches = list_actions, demonstration_searches
        self.families = [family for family in FAMILIES if family in families]
        self.system_prompt = RULES

    def tasks(self, split: str) -> Sequence[Task]:
        name = ALIASES.get(split, split)
        if name not in SIZES:
            raise ValueError(f"ALFWorld has no split {split!r}; it has {', '.join([*SIZES, *ALIASES])}")
        if self.folder is None:
            return LazyTasks(SIZES[name] // len(FAMILIES) * len(self.families),
                             lambda place: self._generated_task(name, place))
        folder = self.folder / FOLDERS[name]
        games = [name for name in original_games(folder) if original_family(name) in self.families]
        if not games:
            raise FileNotFoundError(f"{folder} holds no game of {', '.join(self.families)}: download ALFWorld's data "
                                    "(alfworld-download) or unset ALFWORLD_DATA to play generated games")
        return LazyTasks(len(games), lambda index: Task(key=f"{FOLDERS[name]}/{games[index]}", split=name,
                                                        env_id=self.env_id, family=original_family(games[index])))

    def _generated_task(self, split: str, place: int) -> Task:
        turn, which = divmod(place, len(self.families))
        family = self.families[which]
        index = turn * len(FAMILIES) + list(FAMILIES).index(family)  # of the same game among those of all families
        rooms = scenes(split == "unseen")[family]
        scene = pick(stable_generator(f"alfworld {split} {index}"), rooms)
        return Task(key=f"{split}/{family}/{scene}/{index}", split=split, env_id=self.env_id, family=family,
                    data={"scene": scene})

    def _reset(self, task: Task, rng: np.random.Generator) -> str:
        split, _, name = task.key.partition("/")
        if self.folder is None and "scene" in task.data:
            self.game: Game = make_game(task.family, task.data["scene"], rng)
        elif self.folder is not None and split in FOLDERS.values() and name in original_games(self.folder / split):
            self.game = read_game(self.folder / task.key)
        else:
            raise ValueError(f"{task.key} is no game of {self.folder or 'the generated ones'}: check data= and "
                             "ALFWORLD_DATA")
        self.world = World(self.game)
        return self._with_actions(self.world.intro())

    def _step(self, action: str) -> Outcome:
        command = translate(action)
        valid = command in self.world.actions
        text = self.world.act(command) if valid else NOTHING
        won = self.world.won
        return Outcome(observation=text if won else self._with_actions(text), reward=float(won), terminated=won,
                       success=won, valid=valid)

    def admissible_actions(self) -> list[str]:
        """The engine's own list, sorted."""
        return list(self.world.actions)

    def gold(self, rng: np.random.Generator) -> list[str]:
        """`rng` picks among the objects and receptacles that will do, and what is searched before."""
        actions = plan(self.game, rng, self.demonstration_searches)
        if len(actions) > self.max_turns:
            actions = plan(self.game, rng)
        if len(actions) > self.max_turns:
            raise LookupError(f"the solution takes {len(actions)} turns and there are {self.max_turns}")
        return [f"<action>{action}</action>" for action in actions]

    def state_key(self) -> str:
        """Hash of the task and of all that actions change: where the agent stands and all things and doors."""
        state = {name: sorted(rows) for name, rows in self.world.state().items()}
        return hashlib.sha256(json.dumps([self.task.key, state]).encode()).hexdigest()[:16]

    def copy_state(self) -> dict[str, frozenset[Fact]]:
        return self.world.state()

    def load_state(self, state: dict[str, frozenset[Fact]]) -> None:
        self.world.load(state)

    def _with_actions(self, text: str) -> str:
        return f"{text}\n\nPossible actions: {', '.join(self.world.actions)}" if self.list_actions else text


def _data_folder(data: str | None) -> Path | None:
    """The folder with the splits of the original games; None where none is named."""
    if not data:
        return None
    folder = Path(data).expanduser() / "json_2.1.1"
    if not folder.is_dir():
        raise FileNotFoundError(f"{folder} does not exist: name the folder that alfworld-download filled (data= or "
                                "ALFWORLD_DATA), or none to play generated games")
    return folder
