"""One process of `scripts.bench envs`. It reads a job as a line of JSON and answers so; nothing of the trainers is
imported, so that its memory is the environments' own.

    {"work": "record", "env": ID, "walks": n, "turns": n, "seconds": s}
        ->  {"walks": [{"task": index in its split, "key": its key, "actions": [...]}]}
    {"work": "play", "env": ID, "walks": [...], "instances": n, "seconds": s}
        ->  {"ready": true}, and after one more line of input {"steps", "seconds", "median", "reset", "memory"}
    {"work": "engine", "env": ID, "walks": [...], "engine": i, "seconds": s}   ->  {"env": median, "engine": median}
    what fails   ->  {"error": "..."}
"""

import json
import os
import statistics
import sys
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import psutil

import envs
from scripts._bench.engines import ENGINES

SPLIT = "train"


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what engines print is no answer

    def answer(found: dict[str, Any]) -> None:
        print(json.dumps(found), file=answers, flush=True)

    job = json.loads(sys.stdin.readline())
    try:
        if job["work"] == "play":
            players = [Player(job["env"], job["walks"], i) for i in range(job["instances"])]
            memory = used_memory()
            answer({"ready": True})
            sys.stdin.readline()
            answer(play(players, job["seconds"]) | {"memory": memory})
        elif job["work"] == "record":
            answer({"walks": record(job["env"], job["walks"], job["turns"], job["seconds"])})
        else:
            answer(beside_engine(job["env"], job["walks"], job["engine"], job["seconds"]))
    except Exception as error:  # the parent says why there is no number
        answer({"error": f"{type(error).__name__}: {error}"})


def record(env_id: str, count: int, turns: int, seconds: float) -> list[dict[str, Any]]:
    """Random walks through the first tasks: at least one, more until the time is over."""
    env, rng, walks = envs.make(env_id), np.random.default_rng(0), []
    tasks, end = env.tasks(SPLIT), time.perf_counter() + seconds
    for index in range(min(count, len(tasks))):
        env.reset(options={"task": tasks[index]})
        actions, over = [], False
        while not over and len(actions) < turns:
            actions.append(env.parse(env.random_action(rng)).text)
            _, _, terminated, truncated, _ = env.step(actions[-1])
            over = terminated or truncated
        walks.append({"task": index, "key": env.task.key, "actions": actions})
        if time.perf_counter() > end:
            break
    env.close()
    return walks


class Player:
    """An instance that plays one walk again and again."""

    def __init__(self, env_id: str, walks: list[dict[str, Any]], index: int):
        walk = walks[index % len(walks)]
        self.env, self.actions = envs.make(env_id), walk["actions"]
        self._task = self.env.tasks(SPLIT)[walk["task"]]
        self._left: Iterator[str] = iter(())
        self.resets: list[float] = []
        self.reset()

    def reset(self) -> None:
        began = time.perf_counter()
        self.env.reset(options={"task": self._task})
        self.resets.append(time.perf_counter() - began)
        self._left = iter(self.actions)

    def step(self) -> float:
        """Seconds of one step, a reset before it not counted."""
        action = next(self._left, None)
        if action is None:
            self.reset()
            action = next(self._left)
        began = time.perf_counter()
        self.env.step(action)
        return time.perf_counter() - began


def play(players: list[Player], seconds: float) -> dict[str, float]:
    """Whole rounds over all instances until the time is over."""
    times, end = [], time.perf_counter() + seconds
    while not times or time.perf_counter() < end:
        times += [player.step() for player in players]
    for player in players:
        player.env.close()
    return {"steps": len(times), "seconds": sum(times), "median": statistics.median(times),
            "reset": statistics.median(time for player in players for time in player.resets)}


def beside_engine(env_id: str, walks: list[dict[str, Any]], index: int, seconds: float) -> dict[str, float]:
    """The environment's and its engine's median seconds, step by step on the same actions."""
    player, engine = Player(env_id, walks, 0), ENGINES[env_id][index]()
    times, end = [], time.perf_counter() + seconds
    while not times or time.perf_counter() < end:
        player.reset()
        engine.begin(player.env)
        for action in player.actions:
            mine, began = player.step(), time.perf_counter()
            engine.act(action)
            times.append((mine, time.perf_counter() - began))
            if time.perf_counter() > end:
                break
    engine.close()
    player.env.close()
    return dict(zip(("env", "engine"), map(statistics.median, zip(*times))))


def used_memory() -> int:
    """Bytes that this process and its children have in memory."""
    process = psutil.Process()
    return sum(one.memory_info().rss for one in (process, *process.children(recursive=True)))


if __name__ == "__main__":
    main()
