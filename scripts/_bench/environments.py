"""Steps a second and memory of every registered environment, and what it costs beyond its engine.

Random walks are recorded first and then played again, so that choosing actions costs nothing. Each number comes from
processes of its own.
"""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import gymnasium
from rich.table import Table

import envs
from scripts._bench.engines import ENGINES

__all__ = ["measure", "registered", "tables"]

INSTANCES, PROCESSES = (1, 8, 64, 256), (1, 2)
QUICK_INSTANCES, QUICK_PROCESSES = (1, 2), (1, 2)
WALKS, TURNS = 16, 20
RECORD_SECONDS, SECONDS = 20.0, 2.0
MEBIBYTE = 2**20


def registered() -> list[str]:
    """The ids of the built-in environments."""
    return [name for name, spec in gymnasium.registry.items() if str(spec.entry_point).startswith(f"{envs.__name__}.")]


def measure(names: Sequence[str], *, quick: bool) -> dict[str, Any]:
    """For each environment rows of `instances`, `processes`, `steps_per_second`, `step_seconds` and `reset_seconds`
    (medians) and `memory` (bytes of all processes), and `engines`; or why it was skipped."""
    return {name: _measure(name, quick) for name in names}


def _measure(name: str, quick: bool) -> dict[str, Any]:
    seconds = 0.05 if quick else SECONDS
    job = {"env": name, "seconds": seconds}
    recorded, = _run([{**job, "work": "record", "walks": 2 if quick else WALKS, "turns": TURNS,
                       "seconds": 0.0 if quick else RECORD_SECONDS}])
    if "error" in recorded:
        return {"skipped": recorded["error"]}
    job["walks"] = recorded["walks"]
    rows, engines = [], {}
    for instances in QUICK_INSTANCES if quick else INSTANCES:
        for processes in QUICK_PROCESSES if quick else PROCESSES:
            if processes <= instances:
                answers = _run([{**job, "work": "play", "instances": instances // processes}] * processes)
                rows.append({"instances": instances, "processes": processes, **_together(answers)})
    for index, engine in enumerate(ENGINES.get(name, ())):
        engines[engine.__name__], = _run([{**job, "work": "engine", "engine": index}])
    return {"rows": rows, "engines": engines}


def _run(jobs: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Each job's answer; those who play begin together. The processes find the modules that this one finds."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    running = [subprocess.Popen([sys.executable, "-P", "-m", "scripts._bench.instances"], stdin=subprocess.PIPE,
                                stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, env=environment)
               for _ in jobs]
    try:
        for process, job in zip(running, jobs):
            print(json.dumps(job), file=process.stdin, flush=True)
        answers = [_answer(process) for process in running]
        ready = [process for process, answer in zip(running, answers) if "ready" in answer]
        for process in ready:
            print(file=process.stdin, flush=True)
        return [_answer(process) if process in ready else answer for process, answer in zip(running, answers)]
    finally:
        for process in running:
            process.communicate()


def _answer(process: subprocess.Popen) -> dict[str, Any]:
    line = process.stdout.readline()
    return json.loads(line) if line else {"error": f"its process ended with code {process.wait()}"}


def _together(answers: Sequence[dict[str, Any]]) -> dict[str, Any]:
    for answer in answers:
        if "error" in answer:
            return answer
    return {"steps_per_second": sum(answer["steps"] / answer["seconds"] for answer in answers),
            "step_seconds": max(answer["median"] for answer in answers),
            "reset_seconds": max(answer["reset"] for answer in answers),
            "memory": sum(answer["memory"] for answer in answers)}


def tables(found: dict[str, Any]) -> list[Table]:
    table = Table(title="environments", title_justify="left", box=None)
    headings = ("instances", "processes", "steps/s", "median step ms", "median reset ms", "memory MiB")
    for heading in ("", *headings):
        table.add_column(heading, justify="right" if heading else "left")
    beside = Table(title="beside the engine alone, the same actions in one process", title_justify="left", box=None)
    for heading in ("", "engine", "environment ms", "engine ms", "difference µs", "ratio"):
        beside.add_column(heading, justify="left" if heading in ("", "engine") else "right")
    for name, one in found.items():
        if "skipped" in one:
            table.add_row(name, f"skipped: {one['skipped']}")
            continue
        for row in one["rows"]:
            size = name, str(row["instances"]), str(row["processes"])
            table.add_row(*size, row["error"]) if "error" in row else table.add_row(
                *size, f"{row['steps_per_second']:,.0f}", f"{1e3 * row['step_seconds']:.3f}",
                f"{1e3 * row['reset_seconds']:.2f}", f"{row['memory'] / MEBIBYTE:,.0f}")
        for engine, row in one["engines"].items():
            beside.add_row(name, engine, f"skipped: {row['error']}") if "error" in row else beside.add_row(
                name, engine, f"{1e3 * row['env']:.3f}", f"{1e3 * row['engine']:.3f}",
                f"{1e6 * (row['env'] - row['engine']):+.0f}", f"{row['env'] / row['engine']:.2f}")
    return [table, beside] if beside.row_count else [table]
