"""Measure speed and memory, on this machine as it is now; docs/performance.md says how.

    python -m scripts.bench envs [--env ID ...] [--out F.json]
    python -m scripts.bench rollout
    python -m scripts.bench train [--model PATH] [--trl-python PYTHON] [--profile]
    python -m scripts.bench credit [--model PATH]
    python -m scripts.bench logprobs

Ratios within one run can be compared; seconds only between runs on a machine that does nothing else.
"""

import argparse
import json
import os
import sys
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # before torch: spinning threads starve whatever runs beside them

from agents.models import ModelError
from scripts._bench import credit, environments, logprobs, rollout, training
from scripts._display import Console, quiet_transformers
from trainers.files import replacing


def main(argv: list[str] | None = None) -> int:
    """Exit codes: 0 done, 1 a measurement failed, 2 wrong arguments, 130 interrupted."""
    arguments, console = parse(argv), Console()
    quiet_transformers(console)
    try:
        if arguments.story == "envs":
            found = environments.measure(arguments.env or environments.registered(), quick=arguments.quick)
            tables = environments.tables(found)
        elif arguments.story == "rollout":
            found = rollout.measure(quick=arguments.quick)
            tables = rollout.tables(found)
        elif arguments.story == "logprobs":
            found = logprobs.measure(quick=arguments.quick)
            tables = logprobs.tables(found)
        elif arguments.story == "train":
            found = training.measure(arguments.model, arguments.trl_python, profile=arguments.profile,
                                     quick=arguments.quick)
            tables = training.tables(found)
        else:
            found = credit.measure(arguments.model, quick=arguments.quick)
            tables = credit.tables(found)
    except KeyboardInterrupt:
        console.error("interrupted; nothing was written")
        return 130
    except (ModelError, RuntimeError) as error:
        console.error(error)
        return 1
    for table in tables:
        console.out.print(table)
    if arguments.out:
        with replacing(arguments.out) as file:
            json.dump(found, file, indent=2)
    return 0


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="bench", description=__doc__, allow_abbrev=False,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    stories = parser.add_subparsers(dest="story", required=True)
    envs = stories.add_parser("envs", help="steps a second and memory of environments")
    envs.add_argument("--env", action="append", metavar="ID", help="only this one; may be given again")
    stories.add_parser("rollout", help="asynchronous rollouts, and kept keys and values")
    stories.add_parser("logprobs", help="memory and time of log-probabilities beside full logits")
    train = stories.add_parser("train", help="a whole training step, beside TRL's, and where its time goes")
    train.add_argument("--trl-python", metavar="PYTHON", help="the Python that has the extra trl (default: no TRL)")
    train.add_argument("--profile", action="store_true", help="also where the time goes")
    for story in (train, stories.add_parser("credit", help="the algorithms' credit step")):
        story.add_argument("--model", metavar="PATH", help="folder or .gguf file (default: a tiny policy)")
    for story in stories.choices.values():
        story.add_argument("--out", type=Path, metavar="F.json")
        story.add_argument("--quick", action="store_true", help="a size that shows that it runs, not how fast")
    arguments = parser.parse_args(argv)
    if arguments.out is not None and (arguments.out.is_dir() or not arguments.out.parent.is_dir()):
        parser.error(f"cannot write {arguments.out}: give a file in a folder that exists")
    return arguments


if __name__ == "__main__":
    sys.exit(main())
