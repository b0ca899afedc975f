"""The `turngym` command: `turngym train ...` runs `scripts/train.py`, from any folder.

This module has a name that nothing else uses, so that it can put the project's own packages first, whatever is
installed under names like `scripts` or `agents`, and make the current folder importable for a user's own environments.
"""

import importlib
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent


def main() -> int | None:
    """Entry point of the console command."""
    sys.path[:0] = [str(ROOT), str(Path.cwd())]
    commands = sorted(path.stem for path in (ROOT / "scripts").glob("*.py") if not path.stem.startswith("_"))
    if len(sys.argv) < 2 or sys.argv[1] not in commands:
        asked = sys.argv[1:] in (["-h"], ["--help"])
        print(f"usage: turngym {{{','.join(commands)}}} ...", file=sys.stdout if asked else sys.stderr)
        return 0 if asked else 2
    command = sys.argv.pop(1)
    sys.argv[0] = f"turngym {command}"
    return importlib.import_module(f"scripts.{command}").main()
