"""Solutions of ALFWorld's games by whoever knows where everything is."""

import numpy as np

from envs.alfworld_world import TREATMENTS, Game, World

ATTEMPTS = 10
"""Other objects and receptacles are tried where a choice leads nowhere; only original games need it."""


def plan(game: Game, rng: np.random.Generator, searches: int = 0) -> list[str]:
    """Actions that solve the game, replayed once. `rng` picks the object, the receptacle and what is searched.

    Before an object is fetched, k other receptacles are looked into, as somebody would who does not know where it is:
    k is 0 half of the time, 1 a quarter, ..., at most `searches`. Raises LookupError where no solution is found.
    """
    for _ in range(ATTEMPTS):
        walk = _Walk(game, rng, searches)
        try:
            walk.solve()
        except LookupError:
            continue
        if walk.world.won:
            return walk.actions
    world = World(game)
    for action in game.walkthrough:
        world.act(action)
    if world.won:
        return list(game.walkthrough)
    raise LookupError(f"no solution found of the game {game.task!r}")


class _Walk:
    """A walk through the game's world, written down."""

    def __init__(self, game: Game, rng: np.random.Generator, searches: int):
        self.game, self.rng, self.searches = game, rng, searches
        self.world, self.actions = World(game), []
        self.unseen = {receptacle for receptacle, _ in game.places}

    def solve(self) -> None:
        game = self.game
        targets = [obj for obj, kind in sorted(game.of("objecttype"))
                   if kind == game.target and (obj,) in game.of("pickupable")]
        if game.family == "look":
            self.fetch(self.choose(targets))
            lamp = self.choose([obj for obj, kind in sorted(game.of("objecttype"))
                                if kind == game.destination and (obj,) in game.of("toggleable")])
            self.go(self.choose(self.holders(lamp)))
            self.do(f"use {game.names[lamp]}")
            return
        goal = self.choose([receptacle for receptacle, _ in game.places
                            if game.destination in game.types.get(receptacle, ())])
        there = [obj for obj in self.world.contents(goal) if obj in targets]
        wanted = 2 - len(there) if game.family == "pick two" else 1
        for _ in range(wanted):
            obj = self.choose([obj for obj in targets if obj not in there])
            there.append(obj)
            self.fetch(obj)
            if game.family in TREATMENTS:
                tool = self.choose([receptacle for receptacle, _ in game.places
                                    if TREATMENTS[game.family][1] in game.types.get(receptacle, ())])
                self.go(tool)
                self.do(f"{game.family} {game.names[obj]} with {game.names[tool]}")
            self.enter(goal)
            self.do(f"move {game.names[obj]} to {game.names[goal]}")

    def fetch(self, obj: str) -> None:
        for _ in range(min(int(self.rng.geometric(0.5)) - 1, self.searches)):
            # One that holds a target is no search: who opens it has found it.
            others = sorted(receptacle for receptacle in self.unseen
                            if not any(self.game.target in self.game.types.get(inside, ())
                                       for inside in self.world.contents(receptacle)))
            if others:
                self.enter(self.choose(others))
        holder = self.choose(self.holders(obj))
        self.enter(holder)
        self.do(f"take {self.game.names[obj]} from {self.game.names[holder]}")

    def enter(self, receptacle: str) -> None:
        self.go(receptacle)
        if self.world.shut(receptacle):
            self.do(f"open {self.game.names[receptacle]}")

    def go(self, receptacle: str) -> None:
        self.unseen.discard(receptacle)
        if (receptacle, self.world.place) not in self.game.places:
            self.do(f"go to {self.game.names[receptacle]}")

    def do(self, action: str) -> None:
        if action not in self.world.actions:
            raise LookupError(f"{action!r} cannot be done here")
        self.world.act(action)
        self.actions.append(action)

    def holders(self, obj: str) -> list[str]:
        return [receptacle for receptacle, _ in self.game.places if obj in self.world.contents(receptacle)]

    def choose(self, options: list[str]) -> str:
        if not options:
            raise LookupError("nothing to choose from")
        return options[int(self.rng.integers(len(options)))]
