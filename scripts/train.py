"""Train an agent.

    python -m scripts.train configs/countdown_tiny.toml --run-dir runs/first
    python -m scripts.train --environment.id my_env:me/Guess-v0 --algorithm.name GRPO --run.steps 50
    python -m scripts.train --resume runs/first [--run.steps 200]
    torchrun --nproc-per-node 8 -m scripts.train CONFIG.toml        (see docs/scaling.md)

Settings are those of trainers/config.py; --section.key VALUE overrides the config file.
"""

import argparse
import os
import sys
import time
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # before torch: spinning threads starve whatever runs beside them

from agents.engine import EngineError
from agents.models import ModelError
from agents.rollout import RolloutError
from scripts._display import Console, SilentDisplay, TrainingDisplay, print_plan, quiet_transformers, setting_help
from trainers.config import TrainConfig, build_config, config_dict, load_config
from trainers.loop import check_device, open_environment, train
from trainers.plan import plan
from trainers.ranks import from_leader, joined_ranks, rank
from trainers.run import Run, RunError
from trainers.settings import SettingsError, merge, read_overrides


def main(argv: list[str] | None = None) -> int:
    """Exit codes: 0 done, 1 the run failed, 2 wrong arguments or settings, 130 interrupted."""
    parser = argparse.ArgumentParser(prog="train", description=__doc__, allow_abbrev=False,
                                     usage="train [CONFIG.toml] [--section.key VALUE ...] [--run-dir DIR] [--dry-run]\n"
                                           "       train --resume DIR [--run.steps N] [--dry-run]",
                                     formatter_class=argparse.RawDescriptionHelpFormatter,
                                     epilog=setting_help(TrainConfig))
    parser.add_argument("--run-dir", help="folder of the run (default: in runs/, by time and process)")
    parser.add_argument("--resume", metavar="DIR", help="go on with the run in this folder")
    parser.add_argument("--dry-run", action="store_true", help="print the resolved config and the plan, load nothing")
    options, overrides = parser.parse_known_args(argv)
    console = Console()
    quiet_transformers(console)
    with joined_ranks():
        return start(options, overrides, console)


def start(options: argparse.Namespace, overrides: list[str], console: Console) -> int:
    """Do what the command line asks for; the exit code of this rank."""
    try:
        run = from_leader(lambda: prepare(options, overrides, console))
    except (SettingsError, RunError) as error:
        return fail(console, error, 2)
    if options.dry_run:
        return 0
    with TrainingDisplay(console, run.folder) if rank() == 0 else SilentDisplay() as display:
        try:
            train(run, display)
        except KeyboardInterrupt as error:
            return fail(console, error, 130, f"interrupted; go on with --resume {run.folder}")
        except (SettingsError, ModelError) as error:
            return fail(console, error, 2)
        except (RunError, RolloutError, EngineError, FloatingPointError) as error:
            return fail(console, error, 1)
    return 0


def fail(console: Console, error: BaseException, code: int, message: str = "") -> int:
    """Say what went wrong, unless the leader does, and return the exit code."""
    if not getattr(error, "of_leader", False):
        console.error(f"rank {rank()}: " * (rank() > 0) + (message or str(error)))
    return code


def prepare(options: argparse.Namespace, overrides: list[str], console: Console) -> Run | None:
    """The run to begin or to go on with; None after a dry run. Raises RunError and SettingsError."""
    file = overrides.pop(0) if overrides and not overrides[0].startswith("-") else None
    if options.resume is not None:
        if file is not None or options.run_dir:
            raise SettingsError("--resume goes on with the run's own settings, in its own folder: give no other")
        run = reopen(options.resume, overrides)
        config = run.config
    else:
        config = load_config(file, overrides)
    open_environment(config)[0].close()
    if options.dry_run:
        print_plan(console, config, list(plan(config)))
        return None
    check_device(config)
    if options.resume is None:
        name = f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"
        run = Run.create(options.run_dir or Path("runs") / name, config)
    elif overrides:
        run.save_config()
    if run.over(run.done):
        longer = "; --run.steps N makes it longer" * (run.done >= config.run.steps)
        console.err.print(f"finished at step {run.done}{longer}")
    return run


def reopen(folder: str, overrides: list[str]) -> Run:
    """The run to go on with. Raises RunError, and SettingsError for an override of anything but `run.steps`."""
    run = Run.open(folder)
    match read_overrides(overrides):
        case {"run": {"steps": _, **others}, **rest} as changes if not others and not rest:
            run.change_steps(build_config(merge(config_dict(run.config), changes)).run.steps)
        case changes if changes:
            raise SettingsError("--resume goes on with the run's own settings; only --run.steps N can be another, got "
                                + " ".join(overrides))
    return run


if __name__ == "__main__":
    sys.exit(main())
