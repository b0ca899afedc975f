"""A small environment, and tasks for it."""

from envs.core import Outcome, Task, TextEnv


def tasks(count):
    return [Task(key=str(i)) for i in range(count)]


class Counting(TextEnv):
    """Reach 3 by saying `+`; anything else is invalid. At most 3 turns."""

    max_turns = 3
    made: list["Counting"]

    def __init__(self):
        super().__init__()
        self.closed = 0
        type(self).made.append(self)

    def tasks(self, split):
        return [Task(key=str(i)) for i in range(8)]

    def _reset(self, task, rng):
        self.count = 0
        return "0"

    def _step(self, action):
        self.count += action == "+"
        solved = self.count == 3
        return Outcome(observation=str(self.count), reward=float(solved), terminated=solved, success=solved,
                       valid=action == "+")

    def gold(self, rng):
        return ["+"] * 3

    def close(self):
        self.closed += 1
