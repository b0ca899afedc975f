"""Success rate of an agent on the first problems of a split, with its 95% interval.

    python -m scripts.evaluate --env turngym/Countdown-v0 --agent model --model runs/first/checkpoints/step-000100 \\
        --split heldout --episodes 256 --references --out evaluation.json
    python -m scripts.evaluate --env turngym/Countdown-v0 --agent model --engine openai --model NAME \\
        --base-url http://127.0.0.1:8000/v1
    python -m scripts.evaluate --env turngym/Countdown-v0 --agent model --engine vllm --model PATH
    turngym evaluate --env my_env:me/Guess-v0 --agent random --split train --episodes 10

docs/evaluation.md says what each number means.
"""

import argparse
import json
import os
import sys
import tempfile
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # before torch: spinning threads starve whatever runs beside them

import gymnasium

import envs
from agents.agent import Agent, ModelAgent, ScriptedAgent
from agents.engine import EngineError
from agents.models import Policy, load_outline, load_policy
from agents.openai_engine import ChatAgent, OpenAIEngine
from agents.rollout import Rollout, RolloutError
from agents.trajectory import Group
from agents.transformers_engine import TransformersEngine
from agents.vllm_engine import VLLMEngine
from envs.core import Task
from scripts._display import Bar, Console, quiet_transformers
from trainers.config import EngineSettings
from trainers.engines import connected, make_replicas
from trainers.evaluation import Evaluation, play, select_panel, summarise, table
from trainers.files import replacing
from trainers.settings import SettingsError, read_overrides
from trainers.transcripts import write_trajectories

SCRIPTED = ("gold", "random", "noop")


def main(argv: list[str] | None = None) -> int:
    """Exit codes: 0 done, 1 no problem could be counted or the engine failed, 2 wrong arguments, 130 interrupted."""
    arguments, console = parse(argv), Console()
    try:
        with ExitStack() as beside:
            return run(arguments, console, beside)
    except KeyboardInterrupt:
        console.error("interrupted; nothing was written")
        return 130


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="evaluate", description=__doc__, allow_abbrev=False,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--env", required=True, help="namespace/Name-v0, or module:namespace/Name-v0 of your own")
    parser.add_argument("--option", action="append", default=[], metavar="KEY=VALUE", help="option of its constructor")
    parser.add_argument("--agent", choices=(*SCRIPTED, "model"), required=True)
    parser.add_argument("--model", metavar="PATH",
                        help="folder, .gguf file or hub name; with --engine openai the server's name for it")
    parser.add_argument("--engine", choices=("transformers", "vllm", "openai"), default="transformers",
                        help="vllm: asked by token ids (docs/engines.md); openai: any server of chat completions, its "
                             "key is the variable OPENAI_API_KEY")
    parser.add_argument("--base-url", metavar="URL", help="of that server, as http://127.0.0.1:8000/v1 (vllm: without "
                                                          "/v1; none: one is started for the evaluation)")
    parser.add_argument("--vllm-python", metavar="PATH", help="interpreter that has vLLM (default: this one)")
    parser.add_argument("--vllm-argument", action="append", default=[], metavar="ARGUMENT",
                        help="further argument of the vLLM server, as --vllm-argument=--enforce-eager")
    parser.add_argument("--concurrency", type=int, metavar="N",
                        help="episodes under way at once, each with one request (default 256, with a server 32)")
    parser.add_argument("--split", default="heldout")
    parser.add_argument("--episodes", type=int, default=256, help="problems: the first of the split (default 256)")
    parser.add_argument("--samples", type=int, default=1, help="episodes per problem (default 1)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--temperature", type=float,
                        help="0 is greedy (default: 0 for one sample per problem, 1 for several)")
    parser.add_argument("--max-response-tokens", type=int, default=512, help="in one turn (default 512)")
    parser.add_argument("--window", type=int, metavar="K", help="a prompt holds the last K turns (default: all)")
    parser.add_argument("--episode-seconds", type=float, default=600.0, metavar="S",
                        help="deadline of one try of an episode (default 600)")
    parser.add_argument("--references", action="store_true", help="also play gold, random and noop")
    parser.add_argument("--out", type=Path, metavar="F.json", help="write the numbers there")
    parser.add_argument("--trajectories", type=Path, metavar="F.jsonl", help="write the agent's episodes there")
    arguments = parser.parse_args(argv)
    if (arguments.agent == "model") != bool(arguments.model):
        parser.error("--agent model needs --model PATH, and no other agent takes one")
    if not arguments.model and arguments.engine != "transformers":
        parser.error(f"--engine {arguments.engine} is for --agent model")
    if arguments.engine == "openai" and not arguments.base_url:
        parser.error("--engine openai needs --base-url URL")
    if arguments.engine == "transformers" and arguments.base_url:
        parser.error("--base-url is for --engine openai and --engine vllm")
    if (arguments.engine != "vllm" or arguments.base_url) and (arguments.vllm_python or arguments.vllm_argument):
        parser.error("--vllm-python and --vllm-argument are for a vLLM server that is started here")
    for name, least in (("samples", 1), ("max_response_tokens", 1), ("window", 1), ("concurrency", 1),
                        ("temperature", 0)):
        value = getattr(arguments, name)
        if value is not None and not least <= value < float("inf"):
            parser.error(f"--{name.replace('_', '-')} must be at least {least}, got {value}")
    if not 0 < arguments.episode_seconds < float("inf"):
        parser.error(f"--episode-seconds must be positive, got {arguments.episode_seconds}")
    if arguments.temperature is None:
        arguments.temperature = 0.0 if arguments.samples == 1 else 1.0
    if arguments.concurrency is None:
        arguments.concurrency = 32 if arguments.engine == "openai" else 256
    for path in (arguments.out, arguments.trajectories):
        if path is not None and (path.is_dir() or not path.parent.is_dir()):
            parser.error(f"cannot write {path}: give a file in a folder that exists")
    return arguments


@dataclass(frozen=True)
class Panel:
    """What every agent plays."""

    rollout: Rollout
    tasks: list[Task]
    samples: int
    seed: int
    console: Console

    def play(self, name: str, agent: Agent) -> tuple[Evaluation, list[Group]]:
        """The agent's evaluation and episodes."""
        with Bar(self.console, name, len(self.tasks) * self.samples) as bar:
            groups, report = play(self.rollout, agent, self.tasks, samples=self.samples, seed=self.seed,
                                  on_episode=lambda trajectory: bar.step())
        if report.dropped_groups:
            self.console.error(f"{name}: {report.dropped_groups} of {len(self.tasks)} problems failed and do not count "
                               f"({dict(report.errors)}); the first failure was:\n{report.first_traceback}")
        return summarise(self.tasks, groups, report, samples=self.samples, seed=self.seed), groups


def run(arguments: argparse.Namespace, console: Console, beside: ExitStack) -> int:
    """`beside` closes what the agent needs."""
    quiet_transformers(console)
    try:
        options = read_overrides([f"--{option}" for option in arguments.option])
        env = envs.make(arguments.env, **options)
        tasks = select_panel(env, arguments.split, arguments.episodes)
        agent = make_agent(arguments, beside)
    except EngineError as error:
        console.error(error)
        return 1
    except (SettingsError, gymnasium.error.Error, ImportError, TypeError, ValueError, LookupError, NotImplementedError,
            OSError) as error:
        console.error(f"cannot evaluate {arguments.env}: {error or type(error).__name__}")
        return 2
    rollout = Rollout(lambda: envs.make(arguments.env, **options), concurrency=arguments.concurrency,
                      episode_seconds=arguments.episode_seconds)
    panel = Panel(rollout, tasks, arguments.samples, arguments.seed, console)
    try:
        evaluation, groups = panel.play(arguments.agent, agent)
        references = play_references(panel, arguments.agent) if arguments.references else {}
    except RolloutError as error:
        console.error((agent.engine.refusal if isinstance(agent, ChatAgent) else None) or error)
        return 1
    finally:
        rollout.close()
        env.close()
    console.out.print(table({arguments.agent: evaluation, **references}))
    if arguments.out:
        with replacing(arguments.out) as file:
            json.dump(report(arguments, evaluation, references), file, indent=2, allow_nan=False)
    if arguments.trajectories:
        write_trajectories(arguments.trajectories, (t for group in groups for t in group.trajectories))
    return 0


def make_agent(arguments: argparse.Namespace, beside: ExitStack) -> Agent:
    if arguments.agent != "model":
        return ScriptedAgent(arguments.agent)
    options = {name: getattr(arguments, name) for name in ("temperature", "window", "max_response_tokens")}
    if arguments.engine == "openai":
        # A request that hangs leaves its episode the time for another.
        return ChatAgent(OpenAIEngine(arguments.base_url, arguments.model,
                                      request_seconds=arguments.episode_seconds / 2), **options)
    if arguments.engine == "vllm":
        policy = load_outline(arguments.model)
        return ModelAgent(beside.enter_context(closing(vllm_engine(arguments, policy, beside))), policy, **options)
    policy = load_policy(arguments.model)
    return ModelAgent(TransformersEngine(policy), policy, **options)


def vllm_engine(arguments: argparse.Namespace, policy: Policy, beside: ExitStack) -> VLLMEngine:
    """An engine over a server that runs, or over one that is started. Raises EngineError."""
    folder = Path(beside.enter_context(tempfile.TemporaryDirectory()))  # of the server's log
    settings = EngineSettings(name="vllm", servers=(arguments.base_url,) if arguments.base_url else (),
                              python=arguments.vllm_python, arguments=tuple(arguments.vllm_argument))
    replicas = make_replicas(settings, arguments.model, dtype="auto", max_context=policy.max_context, folder=folder)
    return connected(VLLMEngine(replicas, policy.end_ids, max_context=policy.max_context))


def play_references(panel: Panel, judged: str) -> dict[str, Evaluation]:
    """Evaluations of the scripted agents but the judged one; without gold where the environment knows no solutions."""
    references = {}
    for kind in (kind for kind in SCRIPTED if kind != judged):
        try:
            references[kind], _ = panel.play(kind, ScriptedAgent(kind))
        except RolloutError as error:
            panel.console.error(f"no {kind} reference: {str(error).splitlines()[-1]}")
    return references


def report(arguments: argparse.Namespace, evaluation: Evaluation, references: dict[str, Evaluation]) -> dict[str, Any]:
    """What `--out` holds."""
    model = {name: getattr(arguments, name) for name in ("model", "engine", "base_url", "temperature",
                                                          "max_response_tokens", "window")}
    return {**evaluation.to_json(), "agent": arguments.agent, **(model if arguments.agent == "model" else {}),
            "options": arguments.option, "references": {kind: one.to_json() for kind, one in references.items()}}


if __name__ == "__main__":
    sys.exit(main())
