"""ALFWorld's games: made from the real floor plans of its package, or read from its original files."""

import functools
import importlib.util
import json
import re
import runpy
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from envs.alfworld_pddl import parse, read_goal, read_problem
from envs.alfworld_plan import plan
from envs.alfworld_world import Game

FAMILIES = {"pick": "pick_and_place_simple", "look": "look_at_obj_in_light", "clean": "pick_clean_then_place_in_recep",
            "heat": "pick_heat_then_place_in_recep", "cool": "pick_cool_then_place_in_recep",
            "pick two": "pick_two_obj_and_place"}
"""Our short names -> ALFWorld's."""
ABILITIES = {"Cleanable": "cleanable", "Heatable": "heatable", "Coolable": "coolable", "Sliceable": "sliceable"}
LAMP = "DeskLamp"
LAMP_STANDS = ("Desk", "SideTable", "Dresser", "CoffeeTable", "DiningTable", "Shelf")
MOST_OF_A_KIND = 3
"""Objects of one kind in a room, as in ALFWorld."""
MANGLED = str.maketrans({"|": "_bar_", "-": "_minus_", "+": "_plus_", ".": "_dot_"})
MISSING = ('ALFWorld\'s floor plans and goals come from its package, which is not installed: pip install '
           '"turngym[alfworld]" (docs/alfworld.md says what it brings)')


def package_folder() -> Path:
    """The folder of the `alfworld` package, which is read and never imported: importing it makes folders in the home
    and sets variables of the process. Raises ImportError where it is not installed."""
    spec = importlib.util.find_spec("alfworld")
    if spec is None or not spec.submodule_search_locations:
        raise ImportError(MISSING)
    return Path(spec.submodule_search_locations[0])


@functools.cache
def _constants() -> Mapping[str, Any]:
    return runpy.run_path(str(package_folder() / "gen" / "constants.py"))


@functools.cache
def _goals() -> Mapping[str, Any]:
    return runpy.run_path(str(package_folder() / "gen" / "goal_library.py"))["gdict"]


@functools.cache
def domain_actions() -> Mapping[str, list]:
    """Name -> definition of every action of ALFWorld's PDDL domain."""
    return _actions((package_folder() / "data" / "alfred.pddl").read_text(encoding="utf-8"))


@functools.lru_cache(maxsize=8)
def _actions(domain: str) -> Mapping[str, list]:
    return {part[1]: part for part in parse(domain)[1:] if part[0] == ":action"}


# Floor plans


@dataclass(frozen=True)
class Room:
    """One of AI2-THOR's floor plans."""

    kind: str
    """Kitchen, LivingRoom, Bedroom or Bathroom."""
    receptacles: Mapping[str, str]
    """Id -> location."""
    kinds: Mapping[str, str]
    """Id of a receptacle -> its type."""
    objects: tuple[str, ...]
    """Types of objects that some receptacle of the room may hold, and its lamp."""
    floor: tuple[str, ...]
    """Locations where an agent may stand and that no receptacle has."""

    def holders(self, kind: str) -> set[str]:
        """Types of the room's receptacles that may hold an object type."""
        contain = _constants()["VAL_RECEPTACLE_OBJECTS"]
        return {holder for holder in self.kinds.values()
                if (holder in LAMP_STANDS if kind == LAMP else kind in contain[holder])}

    @functools.cached_property
    def tasks(self) -> Mapping[str, tuple[tuple[str, str], ...]]:
        """Family -> all (object type, type of the receptacle or lamp) that make a game here."""
        able, here = _constants()["VAL_ACTION_OBJECTS"], set(self.kinds.values())
        tools = {"clean": "SinkBasin", "heat": "Microwave", "cool": "Fridge"}
        tasks: dict[str, list[tuple[str, str]]] = {family: [] for family in FAMILIES}
        for kind in self.objects:
            if kind == LAMP:
                continue
            if LAMP in self.objects:
                tasks["look"].append((kind, LAMP))
            # Some other kind of receptacle holds the object at first.
            goals = sorted(self.holders(kind)) if len(self.holders(kind)) > 1 else []
            tasks["pick"] += [(kind, goal) for goal in goals]
            tasks["pick two"] += [(kind, goal) for goal in goals]
            for family, tool in tools.items():
                if tool in here and kind in able[family.capitalize() + "able"]:
                    tasks[family] += [(kind, goal) for goal in goals if goal != tool]
        valid = _constants()["GOALS_VALID"]
        return {family: tuple(pairs) for family, pairs in tasks.items()
                if pairs and self.kind in valid[FAMILIES[family]]}


@functools.cache
def room(number: int) -> Room:
    """The floor plan of a scene number."""
    folder = package_folder() / "gen" / "layouts"
    poses = json.loads((folder / f"FloorPlan{number}-openable.json").read_text(encoding="utf-8"))
    types = json.loads((folder / f"FloorPlan{number}-objects.json").read_text(encoding="utf-8"))
    points = np.load(folder / f"FloorPlan{number}-layout.npy")
    receptacles = {name: _location(*pose) for name, pose in sorted(poses.items())}
    kinds = {name: name.split("|")[-1 if name.endswith("Basin") else 0] for name in receptacles}
    kind = next(kind for kind, numbers in _constants()["SCENE_TYPE"].items() if number in numbers)
    floor = {_location(x, z, 0, 30) for x, z in points.tolist()} - set(receptacles.values())
    found = Room(kind, receptacles, kinds, (), tuple(sorted(floor)))
    return Room(kind, receptacles, kinds, tuple(t for t in sorted(set(types)) if found.holders(t)), found.floor)


@functools.cache
def scenes(unseen: bool) -> Mapping[str, tuple[int, ...]]:
    """Family -> the scenes that have games of it, among those of training or those kept unseen."""
    numbers = _constants()["TEST_SCENE_NUMBERS" if unseen else "TRAIN_SCENE_NUMBERS"]
    return {family: tuple(number for number in numbers if family in room(number).tasks) for family in FAMILIES}


def _location(x: float, z: float, rotation: float, horizon: float) -> str:
    return f"loc|{round(x * 4)}|{round(z * 4)}|{round(rotation / 90)}|{round(horizon)}"


# Making a game


def make_game(family: str, scene: int, rng: np.random.Generator) -> Game:
    """A game of the family in the scene, which `rng` alone decides, solved once by a plan of its own.

    Up to three objects of every kind that belongs in the room lie in places that may hold them; objects of the task's
    kind start anywhere but in the receptacles that they must go to.
    """
    here = room(scene)
    pairs = here.tasks[family]
    kind, goal = pairs[int(rng.integers(len(pairs)))]
    facts: dict[str, set[tuple[str, ...]]] = {"atlocation": {("agent1", _choose(rng, here.floor))}}

    def add(predicate: str, *names: str) -> None:
        facts.setdefault(predicate, set()).add(names)

    contain, able = _constants()["VAL_RECEPTACLE_OBJECTS"], _constants()["VAL_ACTION_OBJECTS"]
    for receptacle, holder in here.kinds.items():
        add("receptacletype", receptacle, f"{holder}Type")
        add("receptacleatlocation", receptacle, here.receptacles[receptacle])
        if holder in _constants()["OPENABLE_CLASS_SET"]:
            add("openable", receptacle)
        for other in here.objects:
            if other in contain[holder]:
                add("cancontain", f"{holder}Type", f"{other}Type")
    for other in here.objects:
        least = 2 if other == kind and family == "pick two" else 1
        holders = here.holders(other) - ({goal} if other == kind else set())
        spots = [name for name, holder in here.kinds.items() if holder in holders]
        count = 1 if other == LAMP else int(rng.integers(least, MOST_OF_A_KIND + 1))
        for _ in range(count):
            receptacle = _choose(rng, spots)
            name = _place(rng, other, receptacle, {obj for obj, _ in facts.get("objecttype", ())})
            add("objecttype", name, f"{other}Type")
            add("inreceptacle", name, receptacle)
            add("objectatlocation", name, here.receptacles[receptacle])
            add("toggleable" if other == LAMP else "pickupable", name)
            for ability, predicate in ABILITIES.items():
                if other in able[ability]:
                    add(predicate, name)
    task = _choose(rng, _goals()[FAMILIES[family]]["templates"]).format(**_goal_words(kind.lower(), goal.lower()))
    mangled = {key: frozenset(tuple(map(_mangle, row)) for row in rows) for key, rows in facts.items()}
    game = Game(family, task, mangled, read_goal(parse(goal_text(family, kind, goal))[1]), f"{kind}Type".lower(),
                f"{goal}Type".lower())
    plan(game, np.random.default_rng(0))  # raises where it cannot be solved
    return game


def goal_text(family: str, kind: str, goal: str) -> str:
    """ALFWorld's `(:goal ...)` for an object type and a type of receptacle or lamp."""
    # The template also closes the problem that it ends.
    text = _goals()[FAMILIES[family]]["pddl"].format(**_goal_words(kind, goal)).strip()
    return text.removesuffix(")").replace(" # ", " - ")


def _goal_words(kind: str, goal: str) -> dict[str, str]:
    return {"obj": kind, "recep": goal, "toggle": goal, "mrecep": ""}


def _place(rng: np.random.Generator, kind: str, receptacle: str, taken: set[str]) -> str:
    """An id for an object near the receptacle, as AI2-THOR writes it."""
    x, y, z = map(float, receptacle.split("|")[1:4])
    while True:
        dx, dz = rng.uniform(-0.4, 0.4, size=2).tolist()
        name = f"{kind}|{x + dx:+06.2f}|{y + 0.05:+06.2f}|{z + dz:+06.2f}"
        if name not in taken:
            return name


def _choose(rng: np.random.Generator, options: Any) -> str:
    return options[int(rng.integers(len(options)))]


@functools.lru_cache(maxsize=10_000)
def _mangle(name: str) -> str:
    """A name as PDDL allows it."""
    return name.lower().translate(MANGLED)


# Original games


@functools.lru_cache(maxsize=8)
def original_games(folder: Path) -> tuple[str, ...]:
    """The playable games under a folder, by path, sorted: those that ALFWorld plays too (no sliced objects, no movable
    receptacles, known as solvable)."""
    names = []
    for file in sorted(folder.glob("*/*/game.tw-pddl")):
        name = str(file.parent.relative_to(folder))
        if ("movable" not in name and "Sliced" not in name and name.startswith(tuple(FAMILIES.values()))
                and re.search(r'"solvable": *true', file.read_text(encoding="utf-8"))):
            names.append(name)
    return tuple(names)


def original_family(name: str) -> str:
    """The family of an original game, which its folder's name begins with."""
    return next(family for family, long in FAMILIES.items() if name.startswith(long + "-"))


@functools.lru_cache(maxsize=64)
def read_game(folder: Path) -> Game:
    """The game in a folder that holds `game.tw-pddl` and `traj_data.json`.

    Raises OSError where one is missing and ValueError, with the path, where one is broken or is not ALFWorld's.
    """
    try:
        data = json.loads((folder / "game.tw-pddl").read_text(encoding="utf-8"))
        about = json.loads((folder / "traj_data.json").read_text(encoding="utf-8"))
        known = domain_actions()
        strange = [name for name, action in _actions(data["pddl_domain"]).items() if known.get(name) != action]
        if strange:
            raise ValueError(f"its domain is not ALFWorld's: {', '.join(strange)} differ")
        facts, goal = read_problem(data["pddl_problem"])
        family = next((key for key, name in FAMILIES.items() if name == about["task_type"]), None)
        if family is None:
            raise ValueError(f"its task type is {about['task_type']!r}")
        task = re.search(r"Your task is to: (.*?)\.?\"", data["grammar"])[1]
        params = about["pddl_params"]
        destination = params["toggle_target"] if family == "look" else params["parent_target"]
        return Game(family, task, facts, goal, f"{params['object_target']}Type".lower(), f"{destination}Type".lower(),
                    tuple(data.get("walkthrough") or ()))
    except (ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
        raise ValueError(f"{folder} holds no playable ALFWorld game: {type(error).__name__}: {error}; download it "
                         "again") from error
