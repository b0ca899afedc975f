"""Check an environment: one line per property, exit code 1 where one does not hold.

    python -m scripts.check_env turngym/Countdown-v0 --option tool=false
    turngym check_env my_env:me/Guess-v0        # my_env.py in the current folder registers me/Guess-v0
"""

import argparse
import sys

import gymnasium
from rich.console import Console

import envs
from trainers.settings import SettingsError, read_overrides


def main(argv: list[str] | None = None) -> int:
    """0 where every property holds, 1 where one does not, 2 where the environment cannot be made, 130 interrupted."""
    parser = argparse.ArgumentParser(prog="check_env", description="Check an environment, property by property.")
    parser.add_argument("id", help="namespace/Name-v0, or module:namespace/Name-v0 for one of your own")
    parser.add_argument("--option", action="append", default=[], metavar="KEY=VALUE", help="option of its constructor")
    parser.add_argument("--episodes", type=int, default=20, help="tasks that the agents play (default 20)")
    arguments = parser.parse_args(argv)
    console = Console(soft_wrap=True, highlight=False)

    def show(result: envs.CheckResult) -> None:
        mark, style = ("skip", "yellow") if result.skipped else ("ok", "green") if result.ok else ("FAIL", "bold red")
        console.print(f"{mark:<5}", style=style, end="")
        console.print(f"{result.name:<22}{result.detail}", markup=False)

    try:
        options = read_overrides([f"--{option}" for option in arguments.option])
        results = envs.check_text_env(arguments.id, episodes=arguments.episodes, on_result=show, **options)
    except (SettingsError, gymnasium.error.Error, ImportError, TypeError, ValueError, OSError) as error:
        print(f"cannot check {arguments.id}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted before the last property", file=sys.stderr)
        return 130
    return 0 if all(result.ok for result in results) else 1


if __name__ == "__main__":
    sys.exit(main())
