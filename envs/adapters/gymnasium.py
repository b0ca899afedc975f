"""Any `gymnasium.Env` with text or discrete actions; `envs.make` wraps it when its id names no text environment.

    envs.make("FrozenLake-v1", map_name="8x8")
"""

import json
import re
from collections.abc import Sequence
from enum import Enum
from typing import Any

import gymnasium
import numpy as np
from gymnasium import spaces

from envs.adapters.foreign import ForeignEnv, seed_tasks
from envs.core import Outcome, Task, json_value

NAMES = {
    "FrozenLakeEnv": ("left", "down", "right", "up"),
    "TaxiEnv": ("south", "north", "east", "west", "pickup", "dropoff"),
    "CliffWalkingEnv": ("up", "right", "down", "left"),
    "BlackjackEnv": ("stick", "hit"),
}
"""Gymnasium's text games say what their actions mean in their documentation only."""
MAX_TURNS = 100
BACKGROUND = re.compile(r"\x1b\[(?:[\d;]*;)?4\dm(.*?)\x1b\[0m", re.DOTALL)
FOREGROUND = re.compile(r"\x1b\[[\d;]*m(.*?)\x1b\[0m", re.DOTALL)
ESCAPE = re.compile(r"\x1b\[[\d;]*m")


class GymnasiumEnv(ForeignEnv):
    """The observation is the environment's own text, or its value with its `ansi` picture where it has one (marked
    places in brackets). Each response holds one `<action>`: a name or a number of a discrete action, or the text itself
    where actions are texts. What is outside the action space is an invalid action, which the environment does not see.
    """

    action_tags = ("action",)
    stop = ("</action>",)

    def __init__(self, env: gymnasium.Env):
        """Raises TypeError for an environment whose actions are neither text nor discrete."""
        space = env.action_space
        if not isinstance(space, spaces.Discrete | spaces.Text):
            env.close()
            raise TypeError(f"the actions of {env.spec.id if env.spec else env} are {space}: only texts and discrete "
                            "actions can be written; derive from envs.TextEnv for others")
        if env.render_mode is None and env.spec and "ansi" in env.metadata.get("render_modes", ()):
            env.close()
            env = gymnasium.make(env.spec, render_mode="ansi")
        super().__init__(max_turns=env.spec.max_episode_steps or MAX_TURNS if env.spec else MAX_TURNS)
        self.env, self.spec = env, env.spec
        self.actions = _action_names(env) if isinstance(space, spaces.Discrete) else {}
        ask = f"Reply with one action inside <action></action>: {', '.join(self.actions)}." if self.actions else \
            "Reply with one action inside <action></action>."
        self.system_prompt = f"You act in {env.spec.name if env.spec else type(env.unwrapped).__name__}. {ask}"

    def tasks(self, split: str) -> Sequence[Task]:
        return seed_tasks(split, self.env_id)

    def admissible_actions(self) -> list[str]:
        return list(self.actions)

    def random_action(self, rng: np.random.Generator) -> str:
        if self.actions:
            return super().random_action(rng)
        space = self.env.action_space
        length = int(rng.integers(space.min_length, min(space.max_length, space.min_length + 20) + 1))
        return f"<action>{''.join(rng.choice(sorted(space.character_set), size=length))}</action>"

    def close(self) -> None:
        self.env.close()

    def _reset(self, task: Task, rng: np.random.Generator) -> str:
        observation, _ = self.env.reset(seed=task.seed)
        return self._shown(observation)

    def _step(self, action: str) -> Outcome:
        value = self._value(action)
        if value is None:
            choices = f": one of {', '.join(self.actions)}" if self.actions else ""
            return Outcome(observation=f"This is no action here{choices}.", valid=False)
        observation, reward, terminated, truncated, info = self.env.step(value)
        return self.outcome(self._shown(observation), reward, terminated=bool(terminated),
                            truncated=bool(truncated) and not terminated, info=info)

    def _value(self, action: str) -> Any:
        """What the environment's `step` receives; None for what is outside the action space."""
        if not self.actions:
            return action if self.env.action_space.contains(action) else None
        name = action.strip().lower()
        if name in self.actions:
            return self.actions[name]
        number = int(name) if re.fullmatch(r"-?[0-9]{1,9}", name) else None
        return number if number in self.actions.values() else None

    def _shown(self, observation: Any) -> str:
        if isinstance(observation, str):
            return observation
        text = json.dumps(observation, default=json_value)
        if self.env.render_mode != "ansi":
            return text
        picture = FOREGROUND.sub(r"(\1)", BACKGROUND.sub(r"[\1]", str(self.env.render())))
        return f"{ESCAPE.sub('', picture).strip()}\nObservation: {text}"


def _action_names(env: gymnasium.Env) -> dict[str, int]:
    """Each discrete action's name: of the environment's own making, of `NAMES`, or its number."""
    inner, space = env.unwrapped, env.action_space
    names: Sequence[str] = NAMES.get(type(inner).__name__, ())
    if hasattr(inner, "get_action_meanings"):  # the Arcade's convention
        names = inner.get_action_meanings()
    elif isinstance(enum := getattr(inner, "actions", None), type) and issubclass(enum, Enum):  # MiniGrid's
        names = [member.name for member in enum]
    first, count = int(space.start), int(space.n)
    names = [str(name).strip().lower() for name in names]
    if len(set(names)) != count:
        return {str(number): number for number in range(first, first + count)}
    return {name: first + place for place, name in enumerate(names)}
