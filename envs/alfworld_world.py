"""ALFWorld's rules and words: what its PDDL domain and its text grammar do, as sets and strings.

TextWorld plans and parses grammars at every step (30 to 60 ms); this state engine says the same in well under a
millisecond and can be copied. tests/envs/test_alfworld_world.py holds it to TextWorld's own answers, admissible actions
included.
"""

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property

from envs.alfworld_pddl import Conjunction, Fact, Facts

NOTHING = "Nothing happens."
CHANGING = ("atlocation", "opened", "inreceptacle", "objectatlocation", "holds", "isclean", "ishot", "iscool",
            "issliced", "istoggled", "ison")
"""The predicates that actions change."""
LEFT = "left"
"""Not ALFWorld's: (object, receptacle) for what was taken out, which `look` calls lying on the floor."""
TREATMENTS = {"clean": ("cleanable", "sinkbasintype", "isclean", None),
              "heat": ("heatable", "microwavetype", "ishot", "iscool"),
              "cool": ("coolable", "fridgetype", "iscool", "ishot")}
"""Verb -> what the object must be, the receptacle's type, what the object becomes, what it no longer is."""
KNIVES = ("knifetype", "butterknifetype")
ADJECTIVES = (({"isclean", "ishot", "issliced"}, "hot and clean sliced"),
              ({"isclean", "iscool", "issliced"}, "cool and clean sliced"),
              ({"isclean", "issliced"}, "clean sliced"), ({"ishot", "issliced"}, "hot sliced"),
              ({"iscool", "issliced"}, "cool sliced"), ({"isclean", "ishot"}, "hot and clean"),
              ({"isclean", "iscool"}, "cool and clean"), ({"ishot"}, "hot"), ({"isclean"}, "clean"),
              ({"iscool"}, "cold"), ({"issliced"}, "sliced"))
"""The first line whose properties an object all has describes it."""
HELP = """\
Available commands:
  look:                             look around your current location
  inventory:                        check your current inventory
  go to (receptacle):               move to a receptacle
  open (receptacle):                open a receptacle
  close (receptacle):               close a receptacle
  take (object) from (receptacle):  take an object from a receptacle
  move (object) to (receptacle):  place an object in or on a receptacle
  examine (something):              examine a receptacle or an object
  use (object):                     use an object
  heat (object) with (receptacle):  heat an object using a receptacle
  clean (object) with (receptacle): clean an object using a receptacle
  cool (object) with (receptacle):  cool an object using a receptacle
  slice (object) with (object):     slice an object using a sharp object
"""


@dataclass(frozen=True)
class Game:
    """One game, as it stands at the start. Raises ValueError unless one agent stands in one place, with empty hands."""

    family: str
    """Kind of task: pick, look, clean, heat, cool or pick two."""
    task: str
    """What the agent is told to do."""
    facts: Facts
    goal: tuple[Conjunction, ...]
    target: str
    """Type of the object that the task is about, in lower case, as in `appletype`."""
    destination: str
    """Type of the receptacle it goes to, or of the lamp it is looked at under."""
    walkthrough: tuple[str, ...] = ()
    """Actions that solve it, where its file has them."""

    def __post_init__(self):
        if len(self.facts.get("atlocation", ())) != 1 or self.facts.get("holds"):
            raise ValueError("the agent must start in one place and with empty hands")

    def of(self, predicate: str) -> frozenset[Fact]:
        """What a predicate holds for at the start."""
        return self.facts.get(predicate, frozenset())

    @cached_property
    def names(self) -> dict[str, str]:
        """Display names, as in `cabinet 2`: of the ids of a kind, the first one in the alphabet has the largest
        number."""
        ids = {name for rows in self.facts.values() for row in rows for name in row if "_bar_" in name}
        kinds = {name: name.split("_bar_", 1)[0] + ("basin" if "basin" in name else "") for name in ids}
        left, names = Counter(kinds.values()), {}
        for name in sorted(ids):
            names[name] = f"{kinds[name]} {left[kinds[name]]}"
            left[kinds[name]] -= 1
        return names

    @cached_property
    def places(self) -> tuple[Fact, ...]:
        """(receptacle, location), sorted."""
        return tuple(sorted(self.of("receptacleatlocation")))

    @cached_property
    def types(self) -> Mapping[str, frozenset[str]]:
        """Types of objects and of receptacles."""
        types = defaultdict(set)
        for name, kind in (*self.of("objecttype"), *self.of("receptacletype")):
            types[name].add(kind)
        return {name: frozenset(kinds) for name, kinds in types.items()}

    def fits(self, obj: str, receptacle: str) -> bool:
        """Whether the receptacle may hold the object."""
        return any((outer, inner) in self.of("cancontain") for outer in self.types.get(receptacle, ())
                   for inner in self.types.get(obj, ()))


class World:
    """A game under way. `state` and `load` copy all that changes."""

    def __init__(self, game: Game):
        self.game = game
        self.load({name: game.of(name) for name in (*CHANGING, LEFT)})

    def state(self) -> dict[str, frozenset[Fact]]:
        """All facts that may change."""
        return {name: frozenset(rows) for name, rows in self._facts.items()}

    def load(self, state: Mapping[str, Iterable[Fact]]) -> None:
        """Continue from a `state` of the same game."""
        self._facts = {name: set(rows) for name, rows in state.items()}
        self._look_around()

    @property
    def place(self) -> str:
        """The location where the agent stands."""
        return next(iter(self._facts["atlocation"]))[1]

    @property
    def held(self) -> str | None:
        """The object in the agent's hands."""
        return next((obj for _, obj in self._facts["holds"]), None)

    def contents(self, receptacle: str) -> list[str]:
        """The objects in or on a receptacle, seen or not."""
        return sorted(obj for obj, where in self._facts["inreceptacle"] if where == receptacle)

    def shut(self, receptacle: str) -> bool:
        """Whether a receptacle must be opened first."""
        return (receptacle,) in self.game.of("openable") and (receptacle,) not in self._facts["opened"]

    def intro(self) -> str:
        """The text at the start."""
        return f"-= Welcome to TextWorld, ALFRED! =-\n\n{self._look()}\n\nYour task is to: {self.game.task}."

    def act(self, command: str) -> str:
        """Carry out one of `actions` and return what happens; anything else changes nothing."""
        if command not in self.actions:
            return NOTHING
        verb, *words = self.actions[command]
        text = getattr(self, f"_{verb}")(*words)
        if verb not in ("look", "inventory", "help", "examine", "describe"):
            self._look_around()
        return text

    def _of(self, predicate: str) -> Iterable[Fact]:
        return self._facts[predicate] if predicate in self._facts else self.game.of(predicate)

    def _look_around(self) -> None:
        """Find what can be done now, and whether the game is won."""
        game, place, held = self.game, self.place, self.held
        found: dict[str, tuple[str, ...]] = {"look": ("look",), "inventory": ("inventory",), "help": ("help",)}
        name = game.names
        for receptacle, where in game.places:
            if where != place:
                found[f"go to {name[receptacle]}"] = ("go", receptacle, where)
            else:
                self._find_at(receptacle, found)
        if held:
            # Nothing else can be examined: where ALFWorld's domain allows it, a stray comma names an unknown type.
            found[f"examine {name[held]}"] = ("describe", held)
            if game.types.get(held, frozenset()) & set(KNIVES):
                for obj, where in self._facts["objectatlocation"]:
                    if where == place and (obj,) in game.of("sliceable"):
                        found[f"slice {name[obj]} with {name[held]}"] = ("slice", obj, held)
        self.actions: dict[str, tuple[str, ...]] = dict(sorted(found.items()))
        """What the engine lists as admissible -> the verb and the ids it is about."""
        self.won: bool = all(part.holds(self._of) for part in game.goal)
        """Whether the goal holds."""

    def _find_at(self, receptacle: str, found: dict[str, tuple[str, ...]]) -> None:
        """Add what can be done with a receptacle that the agent stands at."""
        game, name, held, shut = self.game, self.game.names, self.held, self.shut(receptacle)
        here = name[receptacle]
        found[f"examine {here}"] = ("examine", receptacle)
        if (receptacle,) in game.of("openable"):
            verb = "open" if shut else "close"
            found[f"{verb} {here}"] = (verb, receptacle)
        for obj in self.contents(receptacle):
            if not shut and not held and (obj,) in game.of("pickupable"):
                found[f"take {name[obj]} from {here}"] = ("take", obj, receptacle)
            if (obj,) in game.of("toggleable"):
                found[f"use {name[obj]}"] = ("use", obj)
        if held:
            if not shut and game.fits(held, receptacle):
                found[f"move {name[held]} to {here}"] = ("move", held, receptacle)
            for verb, (able, kind, *_) in TREATMENTS.items():
                if (held,) in game.of(able) and kind in game.types.get(receptacle, ()):
                    found[f"{verb} {name[held]} with {here}"] = ("treat", verb, held, receptacle)

    # The verbs: each changes the facts and returns what the player reads.

    def _look(self) -> str:
        near = [receptacle for receptacle, where in self.game.places if where == self.place]
        if not near:
            every = dict.fromkeys(receptacle for receptacle, _ in self.game.places)
            return f"You are in the middle of a room. Looking quickly around you, you see {self._list(every)}."
        floor = [obj for obj, where in sorted(self._facts["objectatlocation"]) if where == self.place
                 for receptacle in near if (obj, receptacle) in self._facts[LEFT]]
        facing = _join([self.game.names[receptacle] for receptacle in near])
        return f"You are facing the {facing}. Next to it, you see {self._list(floor)}."

    def _inventory(self) -> str:
        return f"You are carrying: {self._list([self.held])}." if self.held else "You are not carrying anything."

    def _help(self) -> str:
        return HELP

    def _examine(self, receptacle: str) -> str:
        name = self.game.names[receptacle]
        if self.shut(receptacle):
            return f"The {name} is closed."
        content = self._list(self.contents(receptacle))
        if (receptacle,) in self.game.of("openable"):
            return f"The {name} is open. In it, you see {content}."
        return f"On the {name}, you see {content}."

    def _describe(self, obj: str) -> str:
        name = self.game.names[obj]
        if (obj,) in self.game.of("isreceptacleobject"):
            inside = sorted(inner for inner, outer in self.game.of("inreceptacleobject") if outer == obj)
            return f"This is a normal {name}. In it, you see {self._list(inside)}."
        properties = {key for key in ("isclean", "ishot", "iscool", "issliced") if (obj,) in self._facts[key]}
        for needed, adjective in ADJECTIVES:
            if needed <= properties:
                return f"This is a {adjective} {name}."
        if (obj,) in self.game.of("toggleable") and (obj,) in self._facts["istoggled"]:
            return f"This {name} is on."
        return f"There's nothing special about {name}."

    def _go(self, receptacle: str, where: str) -> str:
        agent = next(iter(self._facts["atlocation"]))[0]
        self._facts["atlocation"] = {(agent, where)}
        return f"You arrive at {self.game.names[receptacle]}. {self._examine(receptacle)}"

    def _open(self, receptacle: str) -> str:
        self._facts["opened"].add((receptacle,))
        return f"You open the {self.game.names[receptacle]}. {self._examine(receptacle)}"

    def _close(self, receptacle: str) -> str:
        self._facts["opened"].discard((receptacle,))
        return f"You close the {self.game.names[receptacle]}."

    def _take(self, obj: str, receptacle: str) -> str:
        agent, place = next(iter(self._facts["atlocation"]))
        self._facts["holds"] = {(agent, obj)}
        self._facts["inreceptacle"].discard((obj, receptacle))
        self._facts["objectatlocation"].discard((obj, place))
        self._facts[LEFT].add((obj, receptacle))
        return f"You pick up the {self.game.names[obj]} from the {self.game.names[receptacle]}."

    def _move(self, obj: str, receptacle: str) -> str:
        self._facts["holds"] = set()
        self._facts["inreceptacle"].add((obj, receptacle))
        self._facts["objectatlocation"].add((obj, self.place))
        self._facts[LEFT].discard((obj, receptacle))
        return f"You move the {self.game.names[obj]} to the {self.game.names[receptacle]}."

    def _treat(self, verb: str, obj: str, receptacle: str) -> str:
        _, _, becomes, no_longer = TREATMENTS[verb]
        self._facts[becomes].add((obj,))
        if no_longer:
            self._facts[no_longer].discard((obj,))
        return f"You {verb} the {self.game.names[obj]} using the {self.game.names[receptacle]}."

    def _use(self, obj: str) -> str:
        # ALFWorld says "turn on" whenever the lamp was ever used, and its goals ask for no more.
        self._facts["istoggled"].add((obj,))
        self._facts["ison"] ^= {(obj,)}
        return f"You turn on the {self.game.names[obj]}."

    def _slice(self, obj: str, knife: str) -> str:
        self._facts["issliced"].add((obj,))
        return f"You sliced the {self.game.names[obj]} with the {self.game.names[knife]}."

    def _list(self, ids: Iterable[str]) -> str:
        return _join([f"a {self.game.names[name]}" for name in ids]) or "nothing"


def translate(command: str) -> str:
    """A command in this version's words: one space, lower case, and `move x to y` for the older `put x in/on y`."""
    command = " ".join(command.lower().split())
    return re.sub(r"\Aput (.+?) (?:in/on|into|onto|in|on) (.+)", r"move \1 to \2", command)


def _join(items: list[str]) -> str:
    return f"{', '.join(items[:-1])}, and {items[-1]}" if len(items) > 1 else "".join(items)
