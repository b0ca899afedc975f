"""Environments of other libraries' shapes, for the tests of the adapters and of the servers."""

import gymnasium
from gymnasium import spaces

import envs


class Echo(gymnasium.Env):
    """Gymnasium's interface with texts: say "end" to end it."""

    def __init__(self, limit=None):
        self.action_space = spaces.Text(10, min_length=1)
        self.observation_space = spaces.Text(20, min_length=0)
        self.limit = limit

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.said = 0
        return f"seed {seed}", {}

    def step(self, action):
        self.said += 1
        cut = self.said == self.limit
        return f"you said {action}", 1.0, action == "end", cut, {"odd": object(), "said": self.said}


class Shifted(gymnasium.Env):
    """Discrete actions that begin at -1 and have names; 1 is right."""

    action_space = spaces.Discrete(3, start=-1)
    observation_space = spaces.Box(0, 1, (2,))

    def get_action_meanings(self):
        return ["Left", "Stay", "Right"]

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return self.observation_space.sample() * 0, {}

    def step(self, action):
        return self.observation_space.sample() * 0, 0.25, True, False, {"is_success": bool(action == 1)}


class Guess:
    """A TRL environment class."""

    def __init__(self):
        self.reward, self.done = 0.0, False

    def reset(self, *, secret, **row):
        self.secret = secret
        return "A number from 0 to 9."

    def guess(self, number: int) -> str:
        """Guess the number.

        Args:
            number: from 0 to 9
        """
        if not 0 <= number <= 9:
            raise ValueError("from 0 to 9, please")
        self.done = number == self.secret
        self.reward = float(self.done)
        return "right" if self.done else "wrong"

    def call_home(self) -> str:
        """Reach the outside world, which is down."""
        raise ConnectionError("the world is down")


class Rated(Guess):
    """Says its reward by a method, as newer classes do, and never that it is done."""

    def reset(self, **row):
        self.calls = 0

    def guess(self, number: int) -> str:
        self.calls += 1
        return "hm"

    def get_reward(self):
        return self.calls / 2


class Counting(envs.TextEnv):
    """Ours: counts its open instances; "slow" takes its time, "break" raises."""

    open = 0
    max_turns = 3
    system_prompt = "Count."

    def __init__(self, *, fails=False):
        super().__init__()
        if fails:
            raise ValueError("no such data")
        type(self).open += 1
        self._closed = False

    def tasks(self, split):
        if split != "train":
            raise ValueError(f"Counting has no split {split!r}")
        return [envs.Task(key=str(n), split="train") for n in range(5)]

    def _reset(self, task, rng):
        self.count = 0
        return f"task {task.key}"

    def _step(self, action):
        if action == "break":
            raise RuntimeError("the engine is broken")
        if action.startswith("slow"):
            import time
            time.sleep(float(action.split()[1]))
        self.count += 1
        won = action == "win"
        return envs.Outcome(observation=f"{self.task.key}: {self.count} {action}", reward=float(won), terminated=won,
                            success=won, info={"count": self.count})

    def close(self):
        if not self._closed:
            type(self).open -= 1
        self._closed = True


for name in ("Echo", "Shifted", "Counting"):
    gymnasium.register(f"adapted/{name}-v0", entry_point=f"tests.envs.adapted:{name}", disable_env_checker=True,
                       order_enforce=False)
