"""Play an environment yourself, one line per response. Ctrl-D or Ctrl-C leaves.

    python -m scripts.play turngym/Countdown-v0 --split heldout --task 3
    echo "<answer>3*8</answer>" | python -m scripts.play turngym/Countdown-v0 --seed 7
"""

import argparse
import itertools
import sys
from typing import Any

import gymnasium
from rich.console import Console

import envs
from trainers.settings import SettingsError, read_overrides

SEARCHED_TASKS = 10_000
"""Tasks of a split among which a key is looked for."""
SHOWN_ACTIONS = 30


def main(argv: list[str] | None = None) -> int:
    """0 after an episode, finished or left; 2 where the environment or the task does not exist."""
    parser = argparse.ArgumentParser(prog="play", description="Play an environment in the terminal.")
    parser.add_argument("id", help="namespace/Name-v0, or module:namespace/Name-v0 for one of your own")
    parser.add_argument("--option", action="append", default=[], metavar="KEY=VALUE", help="option of its constructor")
    parser.add_argument("--split", default="train")
    parser.add_argument("--task", help="key or place of the task in its split; without it, the seed's task")
    parser.add_argument("--seed", type=int, help="names a task of the split; without it, any")
    arguments = parser.parse_args(argv)
    console = Console(soft_wrap=True, highlight=False)
    try:
        env = envs.make(arguments.id, **read_overrides([f"--{option}" for option in arguments.option]))
        reset_options: dict[str, Any] = {"split": arguments.split}
        if arguments.task is not None:
            reset_options["task"] = find_task(env, arguments.split, arguments.task)
        observation, info = env.reset(seed=arguments.seed, options=reset_options)
    except (SettingsError, gymnasium.error.Error, ImportError, TypeError, ValueError, LookupError, NotImplementedError,
            OSError) as error:
        print(f"cannot play {arguments.id}: {error or type(error).__name__}", file=sys.stderr)
        return 2
    try:
        console.print(f"Task {info['task_key']} of {arguments.split}, at most {env.max_turns} turns", style="bold",
                      markup=False)
        console.print(env.system_prompt, style="dim", markup=False)
        play(env, observation, console)
    except (EOFError, KeyboardInterrupt):
        console.print("\nleft before the end")
    finally:
        env.close()
    return 0


def find_task(env: envs.TextEnv, split: str, name: str) -> envs.Task:
    """The task of that key or place. Raises LookupError for neither."""
    tasks = env.tasks(split)
    if name.isdecimal() and int(name) < len(tasks):
        return tasks[int(name)]
    for task in itertools.islice(tasks, SEARCHED_TASKS):
        if task.key == name:
            return task
    raise LookupError(f"no task {name!r} among the first {SEARCHED_TASKS:,} of {split!r}; give its place, 0 to "
                      f"{len(tasks) - 1:,}")


def play(env: envs.TextEnv, observation: str, console: Console) -> None:
    """One episode with a person. Raises EOFError or KeyboardInterrupt where they leave."""
    total, over = 0.0, False
    while not over:
        console.print(observation, markup=False)
        if actions := env.admissible_actions():
            shown = " · ".join(actions[:SHOWN_ACTIONS])
            console.print(f"{len(actions)} possible: {shown}", style="dim", markup=False)
        line = console.input("> ")
        # A line without the tags is taken as the action itself, which spares typing them.
        observation, reward, terminated, truncated, info = env.step(env.parse(line).text or line)
        total, over = total + reward, terminated or truncated
        console.print(f"turn {info['turn']}  reward {reward:g}{'' if info['valid'] else '  invalid'}", style="dim")
    console.print(observation, markup=False)
    outcome = "success" if info["success"] else "out of turns" if truncated else "no success"
    console.print(f"{outcome}  reward {total:g}  score {info['score']:g}", style="green" if info["success"] else "red")


if __name__ == "__main__":
    sys.exit(main())
