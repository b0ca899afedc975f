"""Whether ScienceWorld plays the same everywhere, task by task: gold and random actions, again and in another process.

    python -m tests.envs.scienceworld_sweep [--variations 3] [--tasks boil,melt] [--simplifications easy]

Prints a line for each task and exits 1 where an episode differs. The variations are spread over all splits.
"""

import argparse
import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence

import numpy as np

import envs
from envs.core import Task
from envs.scienceworld import VARIATIONS, ScienceWorld

RANDOM_TURNS = 25
Episode = tuple[str, list[str]]
"""Key of a task and the actions of an episode."""


def spread(name: str, count: int) -> list[Task]:
    """`count` variations of a task, from the first to the last."""
    every = [task for split in ("train", "heldout", "test") for task in make(name).tasks(split)]
    return [every[int(i)] for i in np.linspace(0, len(every) - 1, count)]


def make(name: str, simplifications: str = "easy") -> ScienceWorld:
    return envs.make("turngym/ScienceWorld-v0", task_names=[name], simplifications=simplifications)


def episodes(env: ScienceWorld, tasks: Sequence[Task]) -> Iterator[Episode]:
    """For each task the simulator's solution, where it has one, and random actions that do not end the episode."""
    for number, task in enumerate(tasks):
        env.reset(options={"task": task})
        try:
            yield task.key, [env.parse(response).text for response in env.gold(np.random.default_rng(0))]
        except LookupError as error:
            print(f"{task.key}: {error}", file=sys.stderr)
        rng, actions = np.random.default_rng(number), []
        env.reset(options={"task": task})
        for _ in range(RANDOM_TURNS):
            allowed = [action for action in env.admissible_actions() if not action.startswith("focus")]
            actions.append(str(rng.choice(allowed)))
            if any(env.step(actions[-1])[2:4]):
                break
        yield task.key, actions


def play(env: ScienceWorld, task: Task, actions: Sequence[str]) -> list[str]:
    """All that an episode says, turn by turn: text, rewards, ends, infos, state keys."""
    first = env.reset(options={"task": task})
    return [json.dumps(row) for row in (first, *((*env.step(action), env.state_key()) for action in actions))]


def digest(env: ScienceWorld, task: Task, actions: Sequence[str]) -> str:
    """One hash of `play`."""
    return hashlib.sha256("\n".join(play(env, task, actions)).encode()).hexdigest()


def digests(simplifications: str, played: Sequence[Episode]) -> list[str]:
    result = []
    for key, actions in played:
        name, _, variation = key.rpartition("-")
        task = Task(key=key, family=name, data={"task": name, "variation": int(variation)})
        env = make(name, simplifications)
        result.append(digest(env, task, actions))
        env.close()
    return result


def digests_elsewhere(simplifications: str, played: Sequence[Episode], hash_seed: str = "1") -> list[str]:
    """`digests` in another process, where the episodes come in another order."""
    child = subprocess.run([sys.executable, "-m", "tests.envs.scienceworld_sweep", "--child"], check=True, text=True,
                           input=json.dumps([simplifications, played[::-1]]), stdout=subprocess.PIPE,
                           env={**os.environ, "PYTHONHASHSEED": hash_seed})
    return json.loads(child.stdout)[::-1]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--variations", type=int, default=3)
    parser.add_argument("--tasks", default=",".join(VARIATIONS))
    parser.add_argument("--simplifications", default="easy")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        print(json.dumps(digests(*json.load(sys.stdin))))
        return 0
    different = 0
    for name in arguments.tasks.split(","):
        tasks, env = spread(name, arguments.variations), make(name, arguments.simplifications)
        played = list(episodes(env, tasks))
        keys = {task.key: task for task in tasks}
        here = [digest(env, keys[key], actions) for key, actions in played]
        elsewhere = digests_elsewhere(arguments.simplifications, played)
        env.close()
        equal = sum(a == b for a, b in zip(here, elsewhere))
        different += len(played) - equal
        solved = len(played) - len(tasks)
        print(f"{name}: {solved} of {len(tasks)} variations have a gold path; {equal} of {len(played)} episodes equal "
              f"over {sum(len(actions) for _, actions in played)} actions", flush=True)
    return int(different > 0)


if __name__ == "__main__":
    sys.exit(main())
