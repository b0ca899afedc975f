"""ALFWorld's state engine says what TextWorld says, and its PDDL is read right."""

import importlib.util
import json
import os
import sys

import numpy as np
import pytest

from envs.alfworld_games import FAMILIES, MISSING, make_game, room
from envs.alfworld_pddl import parse, read_goal, read_problem
from envs.alfworld_world import NOTHING, Game, World, translate
from tests.envs.alfworld_walks import RECORD, digest, numbered_game, walk

needs_package = pytest.mark.skipif(importlib.util.find_spec("alfworld") is None, reason=MISSING)
needs_textworld = pytest.mark.skipif(importlib.util.find_spec("textworld") is None, reason=MISSING)


@needs_package
def test_every_step_of_the_recorded_walks_is_textworlds():
    records = [json.loads(line) for line in RECORD.read_text(encoding="utf-8").splitlines()]
    steps, verbs, families, won = 0, set(), set(), 0
    for record in records:
        game = numbered_game(record["game"])
        world = World(game)
        (_, first), *rows = record["rows"]
        assert digest(world, world.intro()) == first, f"game {record['game']} begins differently"
        for turn, (command, expected) in enumerate(rows, start=1):
            assert digest(world, world.act(command)) == expected, f"game {record['game']}, turn {turn}: {command}"
            verbs.add(command.split()[0])
            won += world.won
        steps, families = steps + len(rows), families | {game.family}
    assert steps >= 2000 and families == FAMILIES.keys() and won > len(records)
    assert verbs == {"go", "open", "close", "take", "move", "clean", "heat", "cool", "use", "slice", "examine",
                     "inventory", "look", "help"}


@needs_textworld
def test_a_game_on_textworld_itself_goes_the_same_way_and_leaves_the_process_alone():
    from envs.alfworld_textworld import TextWorldGame, game_file
    arguments, data = list(sys.argv), os.environ.get("ALFWORLD_DATA")
    number = next(n for n in range(0, 60, 2) if len(numbered_game(n).places) < 8)  # a small room: TextWorld is slow
    game, engine, world = numbered_game(number), TextWorldGame(), World(numbered_game(number))
    theirs = walk(engine, engine.reset(game_file(game)), game, number, random_steps=10)
    assert walk(world, world.intro(), game, number, random_steps=10) == theirs
    assert sys.argv == arguments and os.environ.get("ALFWORLD_DATA") == data


def small_game(**facts) -> Game:
    """A cup on a shelf and a shut drawer; further facts as predicate=[arguments, ...]."""
    rows = {"atlocation": [("agent1", "loc_bar_0")],
            "receptacleatlocation": [("drawer_bar_1", "loc_bar_1"), ("shelf_bar_1", "loc_bar_2")],
            "receptacletype": [("drawer_bar_1", "drawertype"), ("shelf_bar_1", "shelftype")],
            "openable": [("drawer_bar_1",)], "objecttype": [("cup_bar_1", "cuptype")],
            "inreceptacle": [("cup_bar_1", "shelf_bar_1")], "pickupable": [("cup_bar_1",)],
            "cancontain": [("drawertype", "cuptype"), ("shelftype", "cuptype")], **facts}
    goal = "(exists (?r - receptacle ?o - object) (and (inReceptacle ?o ?r) (receptacleType ?r DrawerType)))"
    return Game("pick", "put a cup in drawer", {name: frozenset(value) for name, value in rows.items()},
                read_goal(parse(goal)), "cuptype", "drawertype")


def test_success_is_the_goal_and_nothing_less():
    world = World(small_game())
    for command in ("go to shelf 1", "take cup 1 from shelf 1", "go to drawer 1", "open drawer 1"):
        assert world.act(command) != NOTHING and not world.won
    assert world.act("move cup 1 to drawer 1") == "You move the cup 1 to the drawer 1."
    assert world.won
    world.act("take cup 1 from drawer 1")
    assert not world.won


@pytest.mark.parametrize("command", ["", "go to shelf 2", "take cup 1 from drawer 1", "open drawer 1", "examine cup 1",
                                     "move cup 1 to shelf 1", "go to shelf 1 then look", "heat cup 1 with shelf 1"])
def test_what_cannot_be_done_changes_nothing(command):
    world = World(small_game())
    before = world.state(), world.actions
    assert world.act(command) == NOTHING and (world.state(), world.actions) == before


def test_a_copied_state_is_untouched_by_what_follows():
    world = World(small_game())
    world.act("go to shelf 1")
    state, actions = world.state(), dict(world.actions)
    for command in ("take cup 1 from shelf 1", "go to drawer 1", "open drawer 1", "move cup 1 to drawer 1"):
        world.act(command)
    world.load(state)
    assert world.actions == actions and not world.won and world.state() == state
    assert world.act("take cup 1 from shelf 1") == "You pick up the cup 1 from the shelf 1."


@pytest.mark.parametrize("facts", [{"atlocation": []}, {"holds": [("agent1", "cup_bar_1")]},
                                   {"atlocation": [("a", "loc_bar_0"), ("b", "loc_bar_1")]}])
def test_a_game_that_does_not_start_as_all_do_is_refused(facts):
    with pytest.raises(ValueError, match="one place and with empty hands"):
        small_game(**facts)


@pytest.mark.parametrize("older, command", [
    ("put cup 1 in/on shelf 1", "move cup 1 to shelf 1"), ("put cup 1 in drawer 1", "move cup 1 to drawer 1"),
    ("Put  Cup 1 on\tshelf 1", "move cup 1 to shelf 1"), ("put cup 1 into drawer 1", "move cup 1 to drawer 1"),
    ("  go to shelf 1 ", "go to shelf 1"), ("move cup 1 to shelf 1", "move cup 1 to shelf 1"),
    ("put cup 1", "put cup 1"), ("put " * 5000, ("put " * 5000).strip()),
])
def test_older_wordings_are_translated(older, command):
    assert translate(older) == command


def holds(goal, **facts):
    return all(part.holds(lambda name: frozenset(facts.get(name, ()))) for part in read_goal(parse(goal)))


TWO = ("(and (exists (?r - r) (exists (?o - o) (and (in ?o ?r) (exists (?p - o) (and (not (= ?o ?p)) (in ?p ?r)))))))")


@pytest.mark.parametrize("goal, facts, expected", [
    ("(p a)", {"p": [("a",)]}, True), ("(p a)", {"p": [("b",)]}, False), ("(p A)", {"p": [("a",)]}, True),
    # Two different things in the same receptacle.
    (TWO, {"in": [("x", "r")]}, False), (TWO, {"in": [("x", "r"), ("y", "s")]}, False),
    (TWO, {"in": [("x", "r"), ("y", "r")]}, True),
    # The same name in two scopes is two variables.
    ("(and (exists (?x) (p ?x)) (exists (?x) (q ?x)))", {"p": [("a",)], "q": [("b",)]}, True),
    ("(and (exists (?x) (and (p ?x) (exists (?x) (q ?x)))))", {"p": [("a",)], "q": [("b",)]}, True),
    ("(exists (?x) (and (p ?x) (q ?x)))", {"p": [("a",)], "q": [("b",)]}, False),
])
def test_goals_are_read_as_pddl_means_them(goal, facts, expected):
    assert holds(goal, **facts) is expected


@pytest.mark.parametrize("text, message", [
    ("(define (problem x)", "without its"), ("", "without its"), (")", "without its"),
    ("(define (problem x) (:init) (:goal (p a)))", "no .:init"), ("(define (:init (p a)))", "no .:init"),
    ("(define (:init (p a)) (:goal (forall (?x) (p ?x))))", "forall"),
    ("(define (:init (p a)) (:goal (not (p a))))", "not"), ("(define (:init (p a)) (:goal (or (p a) (p b))))", "or"),
])
def test_pddl_that_cannot_be_read_is_refused(text, message):
    with pytest.raises(ValueError, match=message):
        read_problem(text)


@needs_package
def test_rooms_are_the_real_floor_plans():
    kitchen, bathroom = room(1), room(401)
    assert (kitchen.kind, bathroom.kind) == ("Kitchen", "Bathroom")
    # FloorPlan1-openable.json lists 24 receptacles; the pose [0.0, -1.25, 180, 30] is this place on the quarter grid.
    assert len(kitchen.receptacles) == 24
    assert kitchen.receptacles["Cabinet|+00.68|+00.50|-02.20"] == "loc|0|-5|2|30"
    assert "heat" in kitchen.tasks and "heat" not in bathroom.tasks and "look" not in kitchen.tasks
    assert ("Apple", "Microwave") not in kitchen.tasks["heat"]


@needs_package
@pytest.mark.parametrize("family", FAMILIES)
def test_objects_of_the_task_start_where_they_need_not_stay(family):
    rng = np.random.default_rng(0)
    for scene in (n for n in (1, 8, 205, 210, 301, 308, 401, 408) if family in room(n).tasks):
        game = make_game(family, scene, rng)
        targets = {obj for obj, kind in game.of("objecttype") if kind == game.target}
        assert 1 + (family == "pick two") <= len(targets) <= 3
        assert not any(game.destination in game.types[where] for obj, where in game.of("inreceptacle")
                       if obj in targets)
        assert len(game.of("inreceptacle")) == len(game.of("objecttype")) == len(game.of("objectatlocation"))
