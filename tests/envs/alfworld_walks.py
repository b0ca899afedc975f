"""Walks through ALFWorld's games, recorded on TextWorld's engine: `python -m tests.envs.alfworld_walks [GAMES]`.

test_alfworld_world.py replays them. Every second game is made as odd as the original ones can be.
"""

import hashlib
import json
import sys
from collections import defaultdict
from dataclasses import replace
from pathlib import Path

import numpy as np

from envs.alfworld_games import FAMILIES, make_game, scenes
from envs.alfworld_plan import plan
from envs.alfworld_world import Game, World

RECORD = Path(__file__).with_name("alfworld_walks.jsonl")


def numbered_game(number: int) -> Game:
    """Game `number`: the families take turns, and so do rooms of training and unseen ones."""
    rng = np.random.default_rng(number)
    family = list(FAMILIES)[number % len(FAMILIES)]
    rooms = scenes(unseen=number % 4 == 3)[family]
    game = make_game(family, rooms[int(rng.integers(len(rooms)))], rng)
    return odd_game(game, rng) if number % 2 else game


def odd_game(game: Game, rng: np.random.Generator) -> Game:
    """The game with receptacles that share a place, objects in two of them or elsewhere than their receptacle, some
    things clean, hot, open or hollow from the start, and an agent that starts at a receptacle."""
    facts = {name: set(rows) for name, rows in game.facts.items()}

    def some(rows, share):
        return [row for row in sorted(rows) if rng.random() < share]
    receptacles = sorted(facts["receptacleatlocation"])
    for receptacle, where in some(receptacles, 0.3):
        facts["receptacleatlocation"] -= {(receptacle, where)}
        facts["receptacleatlocation"] |= {(receptacle, receptacles[0][1])}
    for obj, _ in some(facts["inreceptacle"], 0.2):
        facts["inreceptacle"] |= {(obj, receptacles[int(rng.integers(len(receptacles)))][0])}
    for obj, where in some(facts["objectatlocation"], 0.2):
        facts["objectatlocation"] -= {(obj, where)}
        facts["objectatlocation"] |= {(obj, receptacles[int(rng.integers(len(receptacles)))][1])}
    pickable = facts["pickupable"]
    for name in ("isclean", "ishot", "isreceptacleobject"):
        facts[name] = set(some(pickable, 0.2))
    hollow = sorted(facts["isreceptacleobject"])
    facts["inreceptacleobject"] = {(obj, hollow[0][0]) for (obj,) in some(pickable - set(hollow), 0.2) if hollow}
    facts["opened"] = set(some(facts.get("openable", ()), 0.3))
    facts["atlocation"] = {("agent1", receptacles[0][1])}
    return replace(game, facts={name: frozenset(rows) for name, rows in facts.items() if rows})


def commands(game: Game, number: int, random_steps: int):
    """A solution where one is known, then random actions: every verb as likely as the others, those that change nothing
    less so, some of them impossible.

    A generator: it is sent the actions that are possible after each command.
    """
    rng = np.random.default_rng(10_000 + number)
    try:
        solution = plan(game, rng, searches=3)
    except LookupError:
        solution = []
    for command in solution:
        yield command
    possible = yield "look"
    for _ in range(random_steps):
        verbs = defaultdict(list)
        for command in sorted(possible):
            verbs[command.split()[0]].append(command)
        if rng.random() < 0.8:
            for verb in ("help", "inventory", "look"):
                del verbs[verb]
        several = verbs[sorted(verbs)[int(rng.integers(len(verbs)))]]
        command = several[int(rng.integers(len(several)))]
        possible = yield f"{command} 9" if rng.random() < 0.05 else command


def digest(engine: World, text: str) -> str:
    """Hash of what an engine says and allows now."""
    return hashlib.sha256(json.dumps([text, list(engine.actions), bool(engine.won)]).encode()).hexdigest()[:12]


def walk(engine, first_text: str, game: Game, number: int, random_steps: int = 60) -> list[tuple[str, str]]:
    """Play `commands` on an engine: every command with the digest of what followed."""
    rows, steps = [("", digest(engine, first_text))], commands(game, number, random_steps)
    command = next(steps)
    while True:
        rows.append((command, digest(engine, engine.act(command))))
        try:
            command = steps.send(list(engine.actions))
        except StopIteration:
            return rows


def main() -> None:
    from envs.alfworld_textworld import TextWorldGame, game_file
    engine = TextWorldGame()
    with RECORD.open("w", encoding="utf-8") as file:
        for number in range(int(sys.argv[1]) if len(sys.argv) > 1 else 60):
            game = numbered_game(number)
            rows = walk(engine, engine.reset(game_file(game)), game, number)
            file.write(json.dumps({"game": number, "rows": rows}) + "\n")
            file.flush()
            print(number, game.family, len(rows), flush=True)


if __name__ == "__main__":
    main()
