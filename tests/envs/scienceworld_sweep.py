"""Whether ScienceWorld plays the same everywhere, task by task: gold and random actions, again and in another process.

    python -m tests.envs.scienceworld_sweep [--variations 3] [--tasks boil,melt] [--simplifications easy] [--out F.json]

Prints a line for each task and, where an episode differs, the first turn that does, and exits 1. The variations are
spread over all splits. With `--out`, what was found is kept, and a second call plays only what is missing there.
"""

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np

import envs
from envs.core import Task
from envs.scienceworld import VARIATIONS, ScienceWorld
from trainers.files import replacing

RANDOM_TURNS = 25
Episode = tuple[str, list[str]]
"""Key of a task and the actions of an episode."""


@dataclass(kw_only=True)
class Found:
    """What was seen of one of the thirty tasks."""

    variations: int
    simplifications: str
    episodes: int = 0
    actions: int = 0
    gold: int = 0
    """Variations that the simulator's own solution completes."""
    notes: list[str] = field(default_factory=list)
    """Solutions that fail, and the first turn of each episode that differs."""
    different: int = 0

    def __str__(self) -> str:
        equal = self.episodes - self.different
        return "\n  ".join([f"{self.gold} of {self.variations} variations have a gold path; {equal} of {self.episodes} "
                            f"episodes equal over {self.actions} actions", *self.notes])


def spread(env: ScienceWorld, name: str, count: int) -> list[Task]:
    """`count` variations of a task, from the first to the last."""
    every = [task for split in ("train", "heldout", "test") for task in env.tasks(split) if task.family == name]
    return [every[int(i)] for i in np.linspace(0, len(every) - 1, count)]


def make(simplifications: str = "easy") -> ScienceWorld:
    return envs.make("turngym/ScienceWorld-v0", simplifications=simplifications)


def episodes(env: ScienceWorld, tasks: Sequence[Task], found: Found) -> Iterator[Episode]:
    """For each task the simulator's solution, where it has one, and random actions that do not end the episode."""
    for number, task in enumerate(tasks):
        env.reset(options={"task": task})
        try:
            yield task.key, [env.parse(response).text for response in env.gold(np.random.default_rng(0))]
            found.gold += 1
        except LookupError as error:
            found.notes.append(str(error))
        rng, actions = np.random.default_rng(number), []
        env.reset(options={"task": task})
        for _ in range(RANDOM_TURNS):
            allowed = [action for action in env.admissible_actions() if not action.startswith("focus")]
            actions.append(str(rng.choice(allowed)))
            if any(env.step(actions[-1])[2:4]):
                break
        yield task.key, actions


def play(env: ScienceWorld, key: str, actions: Sequence[str]) -> list[str]:
    """All that an episode says, turn by turn: text, rewards, ends, infos, state keys."""
    name, _, variation = key.rpartition("-")
    task = Task(key=key, family=name, data={"task": name, "variation": int(variation)})
    first = env.reset(options={"task": task})
    return [json.dumps(row) for row in (first, *((*env.step(action), env.state_key()) for action in actions))]


def play_elsewhere(simplifications: str, played: Sequence[Episode], hash_seed: str = "1") -> list[list[str]]:
    """`play` of each episode in another process, where they come in another order."""
    child = subprocess.run([sys.executable, "-m", "tests.envs.scienceworld_sweep", "--child"], check=True, text=True,
                           input=json.dumps([simplifications, played[::-1]]), stdout=subprocess.PIPE,
                           env={**os.environ, "PYTHONHASHSEED": hash_seed})
    return json.loads(child.stdout)[::-1]


def child() -> None:
    simplifications, played = json.load(sys.stdin)
    env = make(simplifications)
    print(json.dumps([play(env, *episode) for episode in played]))
    env.close()


def sweep(env: ScienceWorld, name: str, found: Found) -> None:
    """Play the variations of one task, and note what there is to see."""
    played = list(episodes(env, spread(env, name, found.variations), found))
    elsewhere = play_elsewhere(found.simplifications, played)
    for (key, actions), there in zip(played, elsewhere):
        here = play(env, key, actions)
        found.episodes += 1
        found.actions += len(actions)
        if here != there:
            found.different += 1
            turn = next(i for i, rows in enumerate(zip(here, there)) if rows[0] != rows[1])
            found.notes.append(f"{key} differs after {actions[:turn]}: {here[turn]} here, {there[turn]} there")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--variations", type=int, default=3)
    parser.add_argument("--tasks", default=",".join(VARIATIONS))
    parser.add_argument("--simplifications", default="easy")
    parser.add_argument("--out", type=Path, metavar="F.json")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        child()
        return 0
    kept = json.loads(arguments.out.read_text()) if arguments.out and arguments.out.exists() else {}
    results = {name: Found(**fields) for name, fields in kept.items()}
    env = make(arguments.simplifications)
    for name in arguments.tasks.split(","):
        found = Found(variations=arguments.variations, simplifications=arguments.simplifications)
        old = results.get(name)
        if old and (old.variations, old.simplifications) == (found.variations, found.simplifications):
            found = old
        else:
            sweep(env, name, found)
            results[name] = found
            if arguments.out:
                with replacing(arguments.out) as file:
                    json.dump({name: asdict(one) for name, one in results.items()}, file, indent=1)
        print(f"{name}: {found}", flush=True)
    env.close()
    return int(any(found.different for found in results.values()))


if __name__ == "__main__":
    sys.exit(main())
