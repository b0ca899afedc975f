"""What asynchronous rollouts and kept keys and values save, on the transformers engine with a tiny random policy; and
what the scheduler itself costs, with an engine and an environment that do nothing.

Lock-step means what it does elsewhere: a batch of episodes takes each turn together, waits for the slowest environment
before the next, and ends before another batch begins.
"""

import asyncio
import gc
import string
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import Any

import numpy as np
import psutil
from rich.table import Table

from agents.agent import ModelAgent, Response
from agents.engine import Completion, Request
from agents.rollout import Rollout, derive_seed
from agents.tiny import make_tiny_policy
from agents.transformers_engine import TransformersEngine
from envs.core import Outcome, Task, TextEnv

SKEWED = {"episodes": 512, "turns": 4, "concurrency": 32, "latency": 0.02}
QUICK_SKEWED = {"episodes": 8, "turns": 2, "concurrency": 4, "latency": 0.002}
SKEW, SLOW_SHARE = 8, 8
"""One episode in SLOW_SHARE has an environment SKEW times as slow."""
KEPT = {"episodes": 16, "turns": 20, "prompt": 64, "response": 8, "observation": 48}
QUICK_KEPT = {"episodes": 2, "turns": 3, "prompt": 16, "response": 4, "observation": 8}
SCHEDULED = {"episodes": 16384, "turns": 8, "concurrency": 4096}
QUICK_SCHEDULED = {"episodes": 64, "turns": 3, "concurrency": 16}
MODEL = {"hidden_size": 128, "layers": 4, "vocabulary": 300, "max_context": 2048}
QUICK_MODEL = {"hidden_size": 32, "layers": 1, "vocabulary": 300, "max_context": 256}


class Slow(TextEnv):
    """Answers each action after its task's latency. A response ends at a letter, so that a random policy ends it."""

    blocking = True
    stop = tuple(string.ascii_letters)

    def tasks(self, split):
        raise ValueError("tasks are made by `skewed_tasks`")

    def _reset(self, task, rng):
        return "Say something."

    def _step(self, action):
        time.sleep(self.task.data["latency"])
        return Outcome(observation="Go on.")


class Instant(TextEnv):
    """Does nothing, at once."""

    def tasks(self, split):
        raise ValueError("tasks are made by `_scheduled`")

    def _reset(self, task, rng):
        return "Say something."

    def _step(self, action):
        return Outcome(observation="Go on.")


class Parrot:
    """An agent, its actor and its engine in one: answers in the next round of the loop."""

    breaks = 0

    def start(self, env: TextEnv, observation: str, seed: int) -> "Parrot":
        return self

    async def act(self) -> Response:
        await asyncio.sleep(0)
        return Response(text="Yes.", prompt_ids=IDS, response_ids=IDS, logprobs=np.zeros(len(IDS), np.float32))

    def observe(self, response: Response, observation: str) -> None:
        pass


IDS = np.ones(4, np.int64)


class Watched:
    """An engine, and for how long it has a request."""

    def __init__(self, engine: TransformersEngine):
        self._engine, self._running, self._since = engine, 0, 0.0
        self.busy = 0.0

    async def generate(self, request: Request) -> Completion:
        if self._running == 0:
            self._since = time.perf_counter()
        self._running += 1
        try:
            return await self._engine.generate(request)
        finally:
            self._running -= 1
            if self._running == 0:
                self.busy += time.perf_counter() - self._since


def measure(*, quick: bool) -> dict[str, Any]:
    """`skewed`: `asynchronous` and `lock_step` with `seconds`, `episodes_per_second` and `engine_idle` (share of the
    time), `wasted_tokens` (sampled, but of no episode that came back) and their `ratio`. `kept`: seconds and prefilled
    tokens with and without what the engine keeps, their `ratio`, and whether both sampled the same. `scheduled`: what a
    turn costs besides engine and environment (`seconds_per_turn`, CPU time of this process), and `memory`: bytes that
    this process grew by while the second half of the episodes was played."""
    model = QUICK_MODEL if quick else MODEL
    return {"skewed": _skewed(model, **(QUICK_SKEWED if quick else SKEWED)),
            "kept": _kept(model, **(QUICK_KEPT if quick else KEPT)),
            "scheduled": _scheduled(**(QUICK_SCHEDULED if quick else SCHEDULED))}


def _policy(model: dict[str, int]):
    return make_tiny_policy(TextEnv(), [f"{string.printable} Say something. Go on."], **model)


def _skewed(model: dict[str, int], *, episodes: int, turns: int, concurrency: int, latency: float) -> dict[str, Any]:
    policy = _policy(model)
    tasks = [Task(key=str(i), data={"latency": latency * (1 if i % SLOW_SHARE else SKEW)}) for i in range(episodes)]
    found = {}
    for name in ("asynchronous", "lock_step"):
        engine = TransformersEngine(policy, slots=concurrency)
        watched = Watched(engine)
        agent = ModelAgent(watched, policy, max_response_tokens=256)
        with closing(Rollout(lambda: Slow(max_turns=turns), concurrency=concurrency)) as rollout:
            kept = _play(name, rollout, agent, tasks[:concurrency])  # later steps of a run find the workers there
            watched.busy, began = 0.0, time.perf_counter()
            kept += _play(name, rollout, agent, tasks)
            seconds = time.perf_counter() - began
        found[name] = {"seconds": seconds, "episodes_per_second": episodes / seconds,
                       "engine_idle": 1 - watched.busy / seconds, "wasted_tokens": engine.sampled_tokens - kept}
    ratio = found["lock_step"]["seconds"] / found["asynchronous"]["seconds"]
    return {**found, "ratio": ratio, "episodes": episodes, "turns": turns, "concurrency": concurrency,
            "latency": latency}


def _play(name: str, rollout: Rollout, agent: ModelAgent, tasks: Sequence[Task]) -> int:
    """Play every task once. Returns the sampled tokens."""
    if name == "asynchronous":
        return rollout.run(agent, tasks, 1, 0)[1].sampled_tokens
    return asyncio.run(lock_step(rollout.make_env, agent, tasks, rollout.concurrency))


async def lock_step(make_env: Callable[[], TextEnv], agent: ModelAgent, tasks: Sequence[Task], concurrency: int) -> int:
    """Play every task once, a batch of `concurrency` at a time. Returns the sampled tokens."""
    loop, sampled = asyncio.get_running_loop(), 0
    with ThreadPoolExecutor(concurrency) as threads:
        for first in range(0, len(tasks), concurrency):
            playing = []
            for task in tasks[first:first + concurrency]:
                env = make_env()
                observation, _ = env.reset(options={"task": task})
                playing.append((env, agent.start(env, observation, derive_seed(0, task.key))))
            for _ in range(env.max_turns):
                responses = await asyncio.gather(*(actor.act() for _, actor in playing))
                outcomes = await asyncio.gather(*(loop.run_in_executor(threads, env.step, response.text)
                                                  for (env, _), response in zip(playing, responses)))
                for (_, actor), response, outcome in zip(playing, responses, outcomes):
                    actor.observe(response, outcome[0])
                    sampled += len(response.response_ids)
    return sampled


def _kept(model: dict[str, int], **size: int) -> dict[str, Any]:
    policy, found, said = _policy(model), {}, []
    for name in ("keeping", "re_prefilling"):
        engine = TransformersEngine(policy, slots=size["episodes"])
        began = time.perf_counter()
        said.append(asyncio.run(converse(engine, forget=name == "re_prefilling", **size)))
        found[name] = {"seconds": time.perf_counter() - began, "prefilled_tokens": engine.prefilled_tokens}
    return {**found, "ratio": found["re_prefilling"]["seconds"] / found["keeping"]["seconds"],
            "same_tokens": all(map(np.array_equal, *said)), **size}


async def converse(engine: TransformersEngine, *, forget: bool, episodes: int, turns: int, prompt: int, response: int,
                   observation: int) -> list[np.ndarray]:
    """Growing conversations of random tokens, their turns together. Returns their ids."""
    rng = np.random.default_rng(0)
    ids = [rng.integers(5, 260, prompt) for _ in range(episodes)]
    for turn in range(turns):
        if forget:
            engine.load({}, version=0)
        completions = await asyncio.gather(*(engine.generate(Request(
            prompt_ids=known, max_new_tokens=response, seed=derive_seed(turn, i), episode=str(i)))
            for i, known in enumerate(ids)))
        ids = [np.concatenate([known, completion.response_ids, rng.integers(5, 260, observation)])
               for known, completion in zip(ids, completions)]
    return ids


def _scheduled(*, episodes: int, turns: int, concurrency: int) -> dict[str, Any]:
    """Half of the episodes, then the other half with everything in place."""
    process, agent = psutil.Process(), Parrot()
    tasks = [Task(key=str(i)) for i in range(episodes // 2)]
    with closing(Rollout(lambda: Instant(max_turns=turns), concurrency=concurrency)) as rollout:
        rollout.run(agent, tasks, 1, 0)
        gc.collect()
        memory, began = process.memory_info().rss, time.process_time()
        rollout.run(agent, tasks, 1, 1)
        seconds = time.process_time() - began
        gc.collect()
    return {"seconds_per_turn": seconds / len(tasks) / turns, "memory": process.memory_info().rss - memory,
            "episodes": episodes, "turns": turns, "concurrency": concurrency}


def tables(found: dict[str, Any]) -> list[Table]:
    skewed, kept = found["skewed"], found["kept"]
    title = (f"{skewed['episodes']} episodes of {skewed['turns']} turns, {skewed['concurrency']} at once; one in "
             f"{SLOW_SHARE} waits {SKEW} × {1e3 * skewed['latency']:.0f} ms a turn: {skewed['ratio']:.1f} × as fast")
    first = Table(title=title, title_justify="left", box=None)
    for heading in ("", "episodes/s", "engine idle", "wasted tokens"):
        first.add_column(heading, justify="right" if heading else "left")
    for name in ("asynchronous", "lock_step"):
        row = skewed[name]
        first.add_row(name.replace("_", "-"), f"{row['episodes_per_second']:.1f}", f"{row['engine_idle']:.1%}",
                      str(row["wasted_tokens"]))
    title = (f"{kept['episodes']} episodes of {kept['turns']} turns, keys and values kept or not: "
             f"{kept['ratio']:.1f} × as fast")
    second = Table(title=title, title_justify="left", box=None)
    for heading in ("", "seconds", "prefilled tokens"):
        second.add_column(heading, justify="right" if heading else "left")
    for name in ("keeping", "re_prefilling"):
        second.add_row(name.replace("_", "-"), f"{kept[name]['seconds']:.2f}", f"{kept[name]['prefilled_tokens']:,}")
    scheduled = found["scheduled"]
    title = (f"{scheduled['episodes']:,} episodes of {scheduled['turns']} turns, {scheduled['concurrency']:,} at once, "
             "engine and environment instant")
    third = Table(title=title, title_justify="left", box=None)
    for heading in ("scheduler time per turn", "growth of memory, second half"):
        third.add_column(heading)
    third.add_row(f"{1e6 * scheduled['seconds_per_turn']:.0f} µs", f"{scheduled['memory'] / 2**20:.1f} MiB")
    return [first, second, third]
