"""Check and measure on a GPU what only a GPU shows; in a small form on the CPU where there is none.

    python -m scripts.gpu_check [--out F.json]

Results equal to the CPU's, the log-probability kernel, speed and memory of models of 0.5B and 1.5B parameters (random
weights: nothing is downloaded), and a training run of a tiny policy: on one H200 in at most eight minutes. Each check
has a process and a time of its own; one that fails is a row that says so, and the others go on. The JSON is written
anew after each.
"""

import argparse
import json
import os
import platform
import sys
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # before torch: spinning threads starve whatever runs beside them

import torch
import transformers
from rich.table import Table

from scripts._bench.child import ask
from scripts._display import Console
from trainers.files import replacing

CHECKS = {"equality": 60, "log-probabilities": 45, "speed 0.5B": 75, "speed 1.5B": 90, "training": 200}
"""Seconds that each may take, its process's start included; 470 together."""
TRAINING_SHARE = 0.7
"""Of its time, for the training check's own steps: the rest is for the warm start's rest and the last step."""


def main(argv: list[str] | None = None) -> int:
    """Exit codes: 0 all holds, 1 a check failed or a limit was passed, 2 wrong arguments, 130 interrupted."""
    parser = argparse.ArgumentParser(prog="gpu_check", description=__doc__, allow_abbrev=False,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, metavar="F.json")
    out = parser.parse_args(argv).out
    if out is not None and (out.is_dir() or not out.parent.is_dir()):
        parser.error(f"cannot write {out}: give a file in a folder that exists")
    console, small = Console(), not torch.cuda.is_available()
    device = "cpu" if small else "cuda"
    found: dict[str, Any] = {"device": f"{platform.machine()} CPU" if small else torch.cuda.get_device_name(),
                             "small": small,
                             "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
                             "seconds": {}, "rows": []}
    if small:
        console.out.print("no GPU here: the small form, on the CPU; its speeds say nothing")
    try:
        for name, seconds in CHECKS.items():
            began = time.perf_counter()
            answers = ask("scripts._bench.accelerator", {"check": name, "device": device, "small": small,
                                                         "seconds": TRAINING_SHARE * seconds}, seconds=seconds)
            found["seconds"][name] = time.perf_counter() - began
            found["rows"] += [{"check": name, **answer, "holds": holds(answer)} for answer in answers]
            console.err.print(f"{name}: {found['seconds'][name]:.0f} s", markup=False)
            if out is not None:
                with replacing(out) as file:
                    json.dump(found, file, indent=2)
    except KeyboardInterrupt:
        console.error("interrupted; what was done is shown")
        console.out.print(table(found))
        return 130
    console.out.print(table(found))
    return int(not all(row["holds"] for row in found["rows"]))


def holds(row: dict[str, Any]) -> bool:
    """Whether a check's row is no failure and within its limit (NaN is not)."""
    return "error" not in row and (row["limit"] is None or row["value"] <= row["limit"])


def table(found: dict[str, Any]) -> Table:
    versions = ", ".join(f"{name} {version}" for name, version in found["versions"].items())
    shown = Table(title=f"{found['device']}, {versions}", title_justify="left", box=None)
    for heading in ("check", "", "value", "at most", ""):
        shown.add_column(heading, justify="right" if heading in ("value", "at most") else "left")
    for row in found["rows"]:
        if "error" in row:
            shown.add_row(row["check"], row["error"], "", "", "FAILED")
        else:
            limit = "" if row["limit"] is None else f"{row['limit']:g}"
            shown.add_row(row["check"], row["what"], f"{row['value']:,.4g} {row['unit']}", limit,
                          "" if row["holds"] else "FAILED")
    return shown


if __name__ == "__main__":
    sys.exit(main())
