"""Supervised fine-tuning on an environment's gold solutions, or on saved trajectories and conversations.

    python -m scripts.sft --env turngym/Countdown-v0 --model tiny --out models/countdown
    python -m scripts.sft --model models/countdown --data played.jsonl --successes-only --out models/better

Only what the agent said is trained. A line of --data is what `scripts.evaluate --trajectories` writes, or
{"messages": [{"role": "user", "content": "..."}, {"role": "assistant", "content": "..."}]}.
"""

import argparse
import os
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # before torch: spinning threads starve whatever runs beside them

import gymnasium

import envs
from agents.models import Policy, load_policy
from agents.rollout import Rollout, RolloutError, derive_seed
from agents.tiny import make_tiny_policy
from agents.trajectory import Trajectory
from envs.core import TextEnv
from scripts._display import Bar, Console, quiet_transformers
from trainers.settings import SettingsError, read_overrides
from trainers.supervised import fine_tune_policy, gold_texts, gold_trajectories
from trainers.transcripts import fits, messages, read_trajectories, tokenise

TOKENIZER_TEXTS = 512
"""Transcripts that a tiny policy's tokenizer is trained on."""
RECIPES = {True: ("muon", 1e-2), False: ("adamw", 1e-5)}
"""Optimiser and learning rate for a tiny policy, which starts from random weights, and for any other."""


def main(argv: list[str] | None = None) -> int:
    """Exit codes: 0 done, 1 the training failed, 2 wrong arguments or data, 130 interrupted."""
    arguments, console = parse(argv), Console()
    try:
        return run(arguments, console)
    except KeyboardInterrupt:
        console.error("interrupted; nothing was saved")
        return 130


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="sft", description=__doc__, allow_abbrev=False,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--env", help="namespace/Name-v0, or module:namespace/Name-v0 of your own; for gold solutions "
                                      "and for --model tiny")
    parser.add_argument("--option", action="append", default=[], metavar="KEY=VALUE", help="option of its constructor")
    parser.add_argument("--split", default="train")
    parser.add_argument("--model", required=True, metavar="PATH", help="folder, .gguf file or hub name; or tiny")
    parser.add_argument("--hidden-size", type=int, default=192, help="of a tiny model (default 192)")
    parser.add_argument("--layers", type=int, default=4, help="of a tiny model (default 4)")
    parser.add_argument("--data", type=Path, metavar="F.jsonl", help="train on these instead of gold solutions")
    parser.add_argument("--successes-only", action="store_true", help="of --data, only what succeeded")
    parser.add_argument("--demonstrations", type=int, default=4096, help="tasks whose gold solution is shown")
    parser.add_argument("--steps", type=int, default=500, help="gradient steps (default 500)")
    parser.add_argument("--batch-size", type=int, default=32, help="transcripts in a step (default 32)")
    parser.add_argument("--learning-rate", type=float, help="the highest one (default: 1e-2 if tiny, else 1e-5)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="folder of the trained model")
    arguments = parser.parse_args(argv)
    if arguments.env is None and (arguments.data is None or arguments.model == "tiny"):
        parser.error("--env is needed for gold solutions and for --model tiny")
    if arguments.successes_only and arguments.data is None:
        parser.error("--successes-only chooses among --data; gold solutions all succeed")
    for name in ("demonstrations", "steps", "batch_size", "learning_rate", "hidden_size", "layers"):
        value = getattr(arguments, name)
        if value is not None and not 0 < value < float("inf"):
            parser.error(f"--{name.replace('_', '-')} must be positive, got {value}")
    if arguments.out.exists() and (not arguments.out.is_dir() or any(arguments.out.iterdir())):
        parser.error(f"{arguments.out} exists already: give a new or an empty folder")
    return arguments


def run(arguments: argparse.Namespace, console: Console) -> int:
    quiet_transformers(console)
    try:
        arguments.out.mkdir(parents=True, exist_ok=True)  # to fail before the training, not after it
        saved = read_data(arguments) if arguments.data else []
        options = read_overrides([f"--{option}" for option in arguments.option])
        env = envs.make(arguments.env, **options) if arguments.env else None
        policy = make_policy(arguments, env, saved)
        trajectories = saved or demonstrate(arguments, options, policy)
    except (SettingsError, gymnasium.error.Error, ImportError, TypeError, ValueError, LookupError, OSError,
            RolloutError) as error:
        console.error(error)
        return 2
    trajectories = [t if fits(t, policy) else tokenise(t, policy) for t in trajectories]
    losses = []
    with Bar(console, "fine-tuning", arguments.steps) as bar:
        def on_step(step: int, metrics: dict[str, float]) -> None:
            losses.append(metrics["loss"])
            bar.step(f"loss {losses[-1]:.3f}")

        try:
            optimizer, learning_rate = RECIPES[arguments.model == "tiny"]
            fine_tune_policy(policy, trajectories, steps=arguments.steps, batch_size=arguments.batch_size,
                             optimizer=optimizer, learning_rate=arguments.learning_rate or learning_rate,
                             seed=arguments.seed, on_step=on_step)
        except FloatingPointError as error:
            console.error(f"{error}\nnothing was saved; lower --learning-rate")
            return 1
    policy.save(arguments.out)
    console.out.print(f"{len(trajectories):,} transcripts, {arguments.steps:,} steps, loss {losses[0]:.3f} -> "
                      f"{losses[-1]:.3f}, saved in {arguments.out}", markup=False, soft_wrap=True)
    return 0


def read_data(arguments: argparse.Namespace) -> list[Trajectory]:
    """The trajectories of `--data`. Raises ValueError where none is left to train on."""
    found = read_trajectories(arguments.data)
    chosen = [t for t in found if t.turns and (t.success or not arguments.successes_only)]
    if not chosen:
        raise ValueError(f"{arguments.data} holds {len(found)} trajectories, none of which can be trained on"
                         + (" with --successes-only" if arguments.successes_only else ""))
    return chosen


def make_policy(arguments: argparse.Namespace, env: TextEnv | None, saved: list[Trajectory]) -> Policy:
    if arguments.model != "tiny":
        return load_policy(arguments.model)
    if saved:
        texts = [message["content"] for t in saved[:TOKENIZER_TEXTS] for message in messages(t)]
    else:
        texts = gold_texts(env, env.tasks(arguments.split)[:TOKENIZER_TEXTS], derive_seed(arguments.seed, "texts"))
    return make_tiny_policy(env, texts, hidden_size=arguments.hidden_size, layers=arguments.layers,
                            seed=arguments.seed)


def demonstrate(arguments: argparse.Namespace, options: dict[str, Any], policy: Policy) -> list[Trajectory]:
    """Gold episodes of the first tasks of the split."""
    with closing(Rollout(lambda: envs.make(arguments.env, **options))) as rollout:
        tasks = rollout.make_env().tasks(arguments.split)[:arguments.demonstrations]
        return gold_trajectories(rollout, policy, tasks, derive_seed(arguments.seed, "demonstrations"))


if __name__ == "__main__":
    sys.exit(main())
