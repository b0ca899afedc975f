"""One training step of this project beside one of TRL's GRPOTrainer: time, tokens, memory, and where our time goes.

Each side runs in processes of its own, in turns, from the same weights, on the same tasks.
"""

import statistics
import tempfile
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from rich.table import Table

import scripts._bench.child as child
from agents.models import Policy, load_policy
from trainers.acting import make_env, make_rollout
from trainers.config import build_config, load_config
from trainers.initial import initial_policy, warm_start
from trainers.settings import merge, read_toml

CONFIG = child.ROOT / "configs" / "countdown_tiny.toml"
TINY = {"tasks": 32, "group_size": 8, "max_response_tokens": 24, "micro_batch_tokens": 16384, "row_tokens": 192,
        "steps": 2}
GIVEN = {"tasks": 4, "group_size": 8, "max_response_tokens": 32, "micro_batch_tokens": 2048, "row_tokens": 512,
         "steps": 1}
"""Sizes of a step of a tiny policy, and of one that was given."""
QUICK = {"tasks": 2, "group_size": 4, "max_response_tokens": 8, "micro_batch_tokens": 512, "row_tokens": 192,
         "steps": 1}
MODEL = {"model": {"device": "cpu"}, "warm_start": {"steps": 200}}
QUICK_MODEL = {"model": {"device": "cpu", "hidden_size": 32, "layers": 1},
               "warm_start": {"steps": 2, "demonstrations": 8}}
TRL = {"batch": 8, "checkpointing": False}
REPEATS = 5
MEBIBYTE = 2**20


def measure(model: str | None, trl_python: str | None, *, profile: bool, quick: bool) -> dict[str, Any]:
    """`sides`: each one's processes, with medians over its steps and its `peak` of memory, and that less imports
    (`used`, bytes); `ratios` of TRL's numbers to ours, one a repeat; `profile`. Raises RuntimeError where a process
    fails."""
    config = load_config(CONFIG)
    size = QUICK if quick else GIVEN if model else TINY
    job = {"environment": config.environment.id, "options": dict(config.environment.options), **size}
    sides: dict[str, list[child.Job]] = {"TRL": [], "turngym": []} if trl_python else {"turngym": []}
    with tempfile.TemporaryDirectory() as folder:
        policy = load_policy(model, device="cpu") if model else tiny_policy(quick)
        policy.save(folder)
        parameters = sum(p.numel() for p in policy.model.parameters())
        del policy
        for _ in range(1 if quick else REPEATS):
            for name, answers in sides.items():
                answers.append(_ask(name, {**job, "model": folder, "profile": False}, trl_python))
        shares = _ask("turngym", {**job, "model": folder, "profile": True}, None)["profile"] if profile else None
    found = {name: [_summary(answer) for answer in answers] for name, answers in sides.items()}
    return {"size": size, "model": Path(model).name if model else "tiny", "parameters": parameters, "sides": found,
            "ratios": _ratios(found) if trl_python else {}, "profile": shares}


def tiny_policy(quick: bool) -> Policy:
    """The policy of `make train` after a short warm start, so that it plays more turns than one."""
    config = build_config(merge(read_toml(CONFIG), QUICK_MODEL if quick else MODEL))
    with closing(make_env(config)) as env:
        policy = initial_policy(config, env)
    with closing(make_rollout(config, **config.warm_start.options)) as demonstrations:
        warm_start(config, policy, demonstrations, lambda step, metrics: None)
    return policy


def tables(found: dict[str, Any]) -> list[Table]:
    size = ", ".join(f"{number} {name.replace('_', ' ')}" for name, number in found["size"].items())
    title = f"a training step of {found['model']} ({found['parameters'] / 1e6:.1f} M parameters): {size}"
    table = _table(title, "", "seconds", "rollout", "sampled tokens/s", "turns", "success", "peak MiB", "less imports")
    for name, runs in found["sides"].items():
        def median(key: str, runs: Sequence[dict[str, float]] = runs) -> float:
            return statistics.median(run[key] for run in runs)
        table.add_row(name, f"{median('seconds'):.2f}", f"{median('rollout_seconds'):.2f}",
                      f"{median('tokens_per_second'):,.0f}", f"{median('turns'):.1f}", f"{median('success_rate'):.0%}",
                      f"{median('peak') / MEBIBYTE:,.0f}", f"{median('used') / MEBIBYTE:,.0f}")
    result = [table]
    if found["ratios"]:
        ratios = _table("TRL's figures over turngym's, run by run", "", "median", "lowest", "highest")
        for name, values in found["ratios"].items():
            ratios.add_row(name, *(f"{one:.2f}" for one in (statistics.median(values), min(values), max(values))))
        result.append(ratios)
    if found["profile"]:
        shares = _table("where turngym's step goes, above 0.5%", "phase", "what", "share")
        for row in found["profile"]:
            if row["share"] > 0.005:
                shares.add_row(row["phase"], row["what"], f"{row['share']:.1%}")
        result.append(shares)
    return result


def _ask(name: str, job: child.Job, trl_python: str | None) -> child.Job:
    if name == "TRL":
        answers = child.ask("scripts._bench.trl_step", {**job, **TRL}, python=trl_python)
    else:
        answers = child.ask("scripts._bench.own_step", job)
    if "error" in answers[-1]:
        raise RuntimeError(f"the step of {name} failed: {answers[-1]['error']}")
    return answers[-1]


def _summary(answer: child.Job) -> dict[str, float]:
    """Medians over a process's steps, and its memory."""
    rows = [{**row, "tokens_per_second": row["sampled_tokens"] / row["seconds"]} for row in answer["rows"]]
    names = ("seconds", "rollout_seconds", "sampled_tokens", "tokens_per_second", "turns", "success_rate")
    return {name: statistics.median(row[name] for row in rows) for name in names} | {
        "peak": answer["peak"], "used": answer["peak"] - answer["imported"]}


def _ratios(sides: dict[str, list[dict[str, float]]]) -> dict[str, list[float]]:
    """TRL's number over ours, repeat by repeat."""
    both = list(zip(sides["TRL"], sides["turngym"]))
    names = {"seconds": "seconds", "peak memory": "peak", "peak memory less imports": "used"}
    return {"seconds per sampled token": [b["tokens_per_second"] / a["tokens_per_second"] for a, b in both]} | {
        shown: [a[key] / b[key] for a, b in both] for shown, key in names.items()}


def _table(title: str, *headings: str) -> Table:
    table = Table(title=title, title_justify="left", box=None)
    for heading in headings:
        table.add_column(heading, justify="left" if heading in ("", "phase", "what") else "right")
    return table
