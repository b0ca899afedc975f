"""Write any model that turngym reads as one plain folder in transformers' format: an adapter merged into its model, a
GGUF file with its weights no longer quantised.

    python -m scripts.export runs/first/checkpoints/step-000100 --out models/first
"""

import argparse
import sys
from pathlib import Path

from agents.models import DTYPES, ModelError, load_policy
from scripts._display import Console, quiet_transformers


def main(argv: list[str] | None = None) -> int:
    """Exit codes: 0 done, 2 wrong arguments, or the model cannot be loaded or written."""
    parser = argparse.ArgumentParser(prog="export", description=__doc__, allow_abbrev=False,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="folder of a model, checkpoint or adapter, .gguf file or hub name")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="a new or an empty folder")
    parser.add_argument("--dtype", choices=DTYPES, default="float32", help="of the weights (default float32)")
    arguments, console = parser.parse_args(argv), Console()
    quiet_transformers(console)
    if arguments.out.exists() and (not arguments.out.is_dir() or any(arguments.out.iterdir())):
        parser.error(f"{arguments.out} exists already: give a new or an empty folder")
    try:
        load_policy(arguments.model, dtype=arguments.dtype, device="cpu").save(arguments.out)
    except (ModelError, OSError) as error:
        console.error(error)
        return 2
    console.out.print(f"saved in {arguments.out}", markup=False, soft_wrap=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
