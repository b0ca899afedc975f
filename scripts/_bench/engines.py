"""The engines beneath environments, driven without them: what an environment's own cost is measured against."""

from typing import Protocol

from envs.core import TextEnv


class Engine(Protocol):
    """Plays what an environment plays."""

    def begin(self, env: TextEnv) -> None:
        """Start the task that `env` has just been reset to."""

    def act(self, action: str) -> None:
        """One step, with all that an agent needs to know of it."""

    def close(self) -> None:
        """End what was started."""


class ALFWorldRules:
    """The state engine of `envs.alfworld_world`."""

    def __init__(self):
        from envs.alfworld_world import World, translate
        self._make, self._translate = World, translate

    def begin(self, env: TextEnv) -> None:
        self._world = self._make(env.game)

    def act(self, action: str) -> None:
        command = self._translate(action)
        if command in self._world.actions:
            self._world.act(command)
        _ = self._world.actions, self._world.won

    def close(self) -> None:
        self._world = None


class TextWorld:
    """ALFWorld's own engine."""

    def __init__(self):
        from envs.alfworld_textworld import TextWorldGame, game_file
        from envs.alfworld_world import translate
        self._engine, self._file, self._translate = TextWorldGame(), game_file, translate

    def begin(self, env: TextEnv) -> None:
        self._engine.reset(self._file(env.game))

    def act(self, action: str) -> None:
        self._engine.act(self._translate(action))
        _ = self._engine.actions, self._engine.won

    def close(self) -> None:
        self._engine = None


class ScienceWorldSimulator:
    """The simulator in Java, with what it says of the score."""

    def __init__(self):
        from envs.scienceworld_simulator import open_world
        self._world = open_world()

    def begin(self, env: TextEnv) -> None:
        self._world.load(env.task.data["task"], env.task.data["variation"], env.simplifications, 0)

    def act(self, action: str) -> None:
        self._world.step(action, 0)

    def close(self) -> None:
        self._world.close()


ENGINES: dict[str, list[type[Engine]]] = {"turngym/ALFWorld-v0": [ALFWorldRules, TextWorld],
                                          "turngym/ScienceWorld-v0": [ScienceWorldSimulator]}
