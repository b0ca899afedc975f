"""Train an agent.

    python -m scripts.train configs/countdown_tiny.toml --run-dir runs/first
    python -m scripts.train --environment.id my_env:me/Guess-v0 --algorithm.name GRPO --run.steps 50
    python -m scripts.train --resume runs/first [--run.steps 200]
    python -m scripts.train CONFIG.toml --cluster ray               (see docs/scaling.md)
    torchrun --nproc-per-node 8 -m scripts.train CONFIG.toml        (see docs/scaling.md)

Settings are those of trainers/config.py; --section.key VALUE overrides the config file.
"""

import argparse
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # before torch: spinning threads starve whatever runs beside them

import torch.distributed as dist

from agents.engine import EngineError
from agents.models import ModelError
from agents.rollout import RolloutError
from scripts._display import Console, SilentDisplay, TrainingDisplay, print_plan, quiet_transformers, setting_help
from trainers.config import TrainConfig, build_config, check_cluster, config_dict, load_config
from trainers.evaluation import Evaluation
from trainers.loop import Display, check_device, open_environment, train
from trainers.plan import plan
from trainers.ranks import from_leader, joined_ranks, rank
from trainers.run import Run, RunError
from trainers.settings import SettingsError, merge, read_overrides


def main(argv: list[str] | None = None) -> int:
    """Exit codes: 0 done, 1 the run failed, 2 wrong arguments or settings, 130 interrupted."""
    parser = argparse.ArgumentParser(prog="train", description=__doc__, allow_abbrev=False,
                                     usage="train [CONFIG.toml] [--section.key VALUE ...] [--run-dir DIR] "
                                           "[--cluster ray] [--dry-run]\n"
                                           "       train --resume DIR [--run.steps N] [--cluster ray] [--dry-run]",
                                     formatter_class=argparse.RawDescriptionHelpFormatter,
                                     epilog=setting_help(TrainConfig))
    parser.add_argument("--run-dir", help="folder of the run (default: in runs/, by time and process)")
    parser.add_argument("--resume", metavar="DIR", help="go on with the run in this folder")
    parser.add_argument("--dry-run", action="store_true", help="print the resolved config and the plan, load nothing")
    parser.add_argument("--cluster", choices=["ray"], help="place the run on the Ray cluster that runs or that "
                                                           "RAY_ADDRESS names, else on one started on this machine")
    options, overrides = parser.parse_known_args(argv)
    console = Console()
    quiet_transformers(console)
    with joined_ranks():
        return start(options, overrides, console)


def start(options: argparse.Namespace, overrides: list[str], console: Console) -> int:
    """Do what the command line asks for; the exit code of this rank."""
    try:
        work = on_ray() if options.cluster else train
        run = from_leader(lambda: prepare(options, overrides, console))
    except (SettingsError, RunError) as error:
        return fail(console, error, 2)
    if options.dry_run:
        return 0
    with TrainingDisplay(console, run.folder) if rank() == 0 else SilentDisplay() as display:
        try:
            work(run, display)
        except KeyboardInterrupt as error:
            return fail(console, error, 130, f"interrupted; go on with --resume {run.folder}")
        except (SettingsError, ModelError) as error:
            return fail(console, error, 2)
        except (RunError, RolloutError, EngineError, FloatingPointError) as error:
            return fail(console, error, 1)
    return 0


def on_ray() -> Callable[[Run, Display], list[Evaluation]]:
    """`train` on a Ray cluster. Raises SettingsError where this process cannot start it."""
    if dist.is_initialized():
        raise SettingsError("with --cluster ray, Ray starts the ranks: run the script by itself, without torchrun")
    try:
        from trainers.cluster import train_on_ray
    except ModuleNotFoundError as error:
        raise SettingsError(f"--cluster ray needs Ray: pip install 'turngym[ray]' ({error})") from error
    return train_on_ray


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
    if options.cluster:
        check_cluster(config)
    open_environment(config)[0].close()
    if options.dry_run:
        print_plan(console, config, list(plan(config, cluster=bool(options.cluster))))
        return None
    if not options.cluster:  # else its learners' machines are asked
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
