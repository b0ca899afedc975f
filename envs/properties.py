"""The properties that every environment here has, one function each: `(case) -> detail`.

A property raises `Violation` (or lets pass whatever the environment raises) where it does not hold, and `NotApplicable`
where the environment has nothing to check.
"""

import gc
import math
import os
import pickle
import random
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import repeat
from operator import methodcaller
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
from gymnasium.utils.env_checker import check_env

from envs.core import Task, TextEnv, clean_text, make
from envs.probing import (
    Case,
    NotApplicable,
    Violation,
    compare,
    digest,
    is_plain,
    kept_global_generators,
    random_responses,
    record,
    replay,
    require,
    respond,
    sample_actions,
)

LEAK_EPISODES, LEAK_MEGABYTES, LEAK_FILES = 50, 30, 5
HOSTILE_SECONDS = 5.0
"""No environment may think longer than this about one odd action."""
PROCESS_SECONDS = 300
SCANNED_TASKS = 500
"""Tasks of a split whose keys are compared; smaller splits are compared whole."""
SILENT = "random_action gives no action: write it, or list admissible_actions"
HOSTILE = {
    "empty": "", "blanks": "   ", "10 kB": "look " * 2000, "two commands": "open door then go north",
    "newline": "go\nnorth", "emoji": "🚪🔑 go", "accents": "e\u0301\u0302\u0303 go", "NUL": "go\x00north",
    "lone surrogate": "go \ud800 north",
    "open bracket": "search[", "two clicks": "click[a] click[b]", "markup": "<answer><tool></answer></tool>",
    "format signs": "%s {0} {} \\1 $(ls)", "code": "__import__('os').getpid()", "parentheses": "(" * 5000,
    "power tower": "9**9**9**9", "right to left": "\u202e\u200b\ufeff go", "digits": "9" * 5000,
    "control": "\x1b[2J\r\x07",
}
INFO_KEYS = {"success", "score", "valid", "scorable", "turn", "task_key", "family"}


def gymnasium_check(case: Case) -> str:
    env = case.make()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # its advice on float spaces and renderers; what is wrong is raised
        check_env(env, skip_render_check=True)
    return "gymnasium's check_env passes"


def reset_seed(case: Case) -> str:
    def task_of(seed: int) -> str:
        case.env.reset(seed=seed, options={"split": case.split})
        return case.env.task.key
    first = [task_of(1234) for _ in range(6)]
    require(len(set(first)) == 1, f"reset(seed=1234) gave the tasks {sorted(set(first))}")
    distinct = len({task_of(seed) for seed in range(20)})
    require(distinct > 1 or len(case.splits[case.split]) == 1, "20 seeds all gave the same task")
    return f"one seed one task; 20 seeds gave {distinct} tasks"


def reset_task(case: Case) -> str:
    for task in case.tasks + case.tasks[::-1]:
        info = case.env.reset(options={"task": task})[1]
        require(case.env.task.key == info["task_key"] == task.key,
                f"reset to task {task.key} played {case.env.task.key}, info says {info['task_key']}")
    return f"{len(case.tasks)} tasks, each reset to twice"


def determinism(case: Case) -> str:
    actions = [sample_actions(case, position) for position in range(min(3, len(case.indices)))]
    with kept_global_generators():
        for task, played in zip(case.tasks, actions):
            expected = replay(case.env, task, played)
            for seed in range(6):
                # An environment that draws from a global generator sees another one each time.
                random.seed(seed)
                np.random.seed(seed)
                compare(expected, replay(case.env, task, played), f"replay of {task.key}")
    return f"{len(actions)} episodes replayed 6 times, equal"


def processes(case: Case) -> str:
    if not case.env_id:
        raise NotApplicable("other processes need an id, not an instance")
    probes = [(case.split, index, sample_actions(case, position)) for position, index in enumerate(case.indices[:3])]
    here = [digest(task, replay(case.env, task, actions)) for task, (_, _, actions) in zip(case.tasks, probes)]
    for hash_seed in ("0", "1"):
        environment = {**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        child = subprocess.run([sys.executable, "-c", "from envs.properties import print_digests; print_digests()"],
                               input=pickle.dumps((case.env_id, case.options, probes)), env=environment,
                               capture_output=True, timeout=PROCESS_SECONDS)
        require(child.returncode == 0, f"another process failed: {child.stderr.decode(errors='replace')[-500:]}")
        there = child.stdout.decode().split()[-len(here):]
        for task, one, other in zip(case.tasks, here, there):
            require(one == other, f"task {task.key} plays differently in a process with PYTHONHASHSEED={hash_seed}")
    return f"{len(here)} episodes equal in 2 further processes"


def print_digests() -> None:
    """What the other process of `processes` does: play the probes of stdin and print a digest of each."""
    env_id, options, probes = pickle.load(sys.stdin.buffer)
    env = make(env_id, **options)
    for split, index, actions in probes:
        task = env.tasks(split)[index]
        print(digest(task, replay(env, task, actions)))
    env.close()


def global_generators(case: Case) -> str:
    def states() -> str:
        return repr((random.getstate(), *map(str, np.random.get_state(legacy=False).items())))

    def untouched(action: str) -> None:
        require(states() == before, f"{action} moved a global generator (random or numpy.random)")
    with kept_global_generators():
        # A state that no environment sets: seeding a generator the way it was seeded before would go unseen.
        random.seed(839_200_415)
        np.random.seed(839_200_415)
        before = states()
        env = case.make()
        untouched("making the environment")
        env.reset(seed=0, options={"split": case.split})
        untouched("reset")
        respond(env, case.tasks[0], random_responses(env, 0))
        untouched("playing")
        env.close()
    return "random and numpy.random as before"


def same_key_same_world(case: Case) -> str:
    seen: dict[str, Task] = {}
    for tasks in case.splits.values():
        for task in tasks[:50]:
            other = seen.setdefault(task.key, task)
            require(is_plain(dict(task.data)), f"the data of task {task.key} are no plain JSON values: {task.data}")
            require((dict(other.data), other.seed) == (dict(task.data), task.seed), f"two worlds are called {task.key}")
    for position, task in zip(range(3), case.tasks):
        actions = sample_actions(case, position)
        expected = replay(case.env, task, actions)
        replay(case.env, case.tasks[-1], [])
        compare(expected, replay(case.env, replace(task, split="another"), actions),
                f"task {task.key} under another split name")
    return f"{len(seen)} keys"


def splits_disjoint(case: Case) -> str:
    if len(case.splits) < 2:
        raise NotApplicable(f"the only split is {case.split!r}")
    keys = {}
    for name, tasks in case.splits.items():
        step = max(1, len(tasks) // SCANNED_TASKS)
        keys[name] = [tasks[i].key for i in range(0, len(tasks), step)]
        if name != "train":
            require(len(set(keys[name])) == len(keys[name]), f"split {name!r} holds a key twice")
    names = list(keys)
    for i, one in enumerate(names):
        for other in names[i + 1:]:
            both = sorted(set(keys[one]) & set(keys[other]))
            require(not both, f"{len(both)} keys are in {one!r} and {other!r}, such as {both[:1]}")
    return ", ".join(f"{name}: {len(tasks):,}" for name, tasks in case.splits.items())


def parse_spans(case: Case) -> str:
    env, found = case.env, 0
    for position, task in enumerate(case.tasks):
        env.reset(options={"task": task})
        response = env.random_action(np.random.default_rng(position))
        for text in (response, f"I think é 🚪: {response}", f"<think>{response}</think>\n{response}"):
            span = env.parse(text)
            require(text[span.start:span.end].strip() == span.text.strip(),
                    f"parse({text!r}) gives {span.text!r} but points at {text[span.start:span.end]!r}")
            found += span.end > span.start
    if not found:
        raise NotApplicable(SILENT)
    return f"{found} actions stand where parse says"


def admissible_actions(case: Case) -> str:
    env, tried = case.env, 0
    for position, task in enumerate(case.tasks[:5]):
        rng = np.random.default_rng(position)
        env.reset(options={"task": task})
        for _ in range(min(3, env.max_turns)):
            listed = env.admissible_actions()
            if not listed:
                break
            here = env.snapshot()
            for action in rng.permutation(listed)[:10].tolist():
                env.restore(here)
                tried += 1
                require(env.step(action)[4]["valid"], f"admissible action {action!r} of task {task.key} is not valid")
            env.restore(here)
            over = env.step(str(rng.choice(listed)))[2:4]
            if any(over):
                break
    if not tried:
        raise NotApplicable("the environment lists no admissible actions")
    return f"{tried} actions, all valid"


def gold_succeeds(case: Case) -> str:
    env, solved = case.env, 0
    for position, task in enumerate(case.tasks):
        env.reset(options={"task": task})
        try:
            responses = env.gold(np.random.default_rng(position))
        except LookupError:
            continue
        actions, steps = respond(env, task, iter(responses))
        require(bool(steps) and steps[-1][4]["success"], f"the gold plan of {task.key} does not succeed: {responses}")
        require(len(actions) == len(responses), f"the gold plan of {task.key} goes on after the end")
        invalid = [action for action, step in zip(actions, steps) if not step[4]["valid"]]
        require(not invalid, f"the gold plan of {task.key} holds invalid actions: {invalid}")
        solved += 1
    if not solved:
        raise NotApplicable("gold() knows no solution")
    return f"{solved} of {len(case.tasks)} tasks have one, all succeed"


def random_agent(case: Case) -> str:
    wins, spoke = 0, False
    for episode in range(case.episodes):
        task = case.tasks[episode % len(case.tasks)]
        actions, steps = respond(case.env, task, random_responses(case.env, episode))
        wins += steps[-1][4]["success"]
        spoke |= any(actions)
    require(wins < case.episodes, f"the random agent succeeds in all of {case.episodes} episodes")
    if not spoke:
        raise NotApplicable(SILENT)
    return f"succeeds in {wins} of {case.episodes} episodes"


def empty_agent(case: Case) -> str:
    for task in case.tasks:
        end = respond(case.env, task, repeat(""))[1][-1]
        require(not end[4]["success"], f"saying nothing succeeds in task {task.key}")
        require(end[1] <= 0, f"saying nothing is rewarded in task {task.key}: {end[1]}")
    return f"never succeeds in {len(case.tasks)} episodes"


def step_values(case: Case) -> str:
    env, count = case.env, 0
    for seed, task in enumerate(case.tasks):
        first, _ = env.reset(options={"task": task})
        require(_is_text(first), f"the first observation of {task.key} is not clean text: {first!r}")
        _, steps = respond(env, task, random_responses(env, seed))
        for turn, (observation, reward, terminated, truncated, info) in enumerate(steps, start=1):
            where = f"task {task.key}, turn {turn}"
            require(_is_text(observation), f"{where}: the observation is not clean text: {observation!r}")
            require(isinstance(reward, float) and math.isfinite(reward), f"{where}: the reward is {reward!r}")
            missing = INFO_KEYS - info.keys()
            require(not missing, f"{where}: info lacks {sorted(missing)}")
            require(0.0 <= info["score"] <= 1.0, f"{where}: the score {info['score']!r} is not in [0, 1]")
            require(not (terminated and truncated), f"{where}: both terminated and truncated")
            require(terminated or not info["success"], f"{where}: success without termination")
            count += 1
    return f"{count} steps"


def terminal_observation(case: Case) -> str:
    as_first = 0
    for seed, task in enumerate(case.tasks):
        first, _ = case.env.reset(options={"task": task})
        steps = respond(case.env, task, random_responses(case.env, seed))[1]
        info = steps[-1][4]
        require((info["task_key"], info["turn"]) == (task.key, len(steps)),
                f"the end of task {task.key} at turn {len(steps)} reports task {info['task_key']}, turn {info['turn']}")
        as_first += steps[-1][0] == first
    require(as_first < len(case.tasks), "every episode ends with the first observation of an episode")
    return f"{len(case.tasks)} episodes end with their own last observation"


def step_after_end(case: Case) -> str:
    respond(case.env, case.tasks[0], random_responses(case.env, 0))
    new = case.make()
    for env, when in ((case.env, "after the end"), (new, "before the first reset")):
        try:
            env.step("")
        except gymnasium.error.ResetNeeded:
            continue
        raise Violation(f"step {when} does not raise gymnasium.error.ResetNeeded")
    new.close()
    return "raises ResetNeeded, before a reset too"


def snapshot_restore(case: Case) -> str:
    def restored(env: TextEnv, snapshot: Any) -> TextEnv:
        env.restore(snapshot)
        return env
    return _resume(case, methodcaller("snapshot"), restored, "after restore")


def pickling(case: Case) -> str:
    return _resume(case, pickle.dumps, lambda _, pickled: pickle.loads(pickled), "after pickling")


def _resume(case: Case, save: Callable[[TextEnv], Any], load: Callable[[TextEnv, Any], TextEnv], where: str) -> str:
    """Save in the middle of an episode, play to its end, load, play to the end again."""
    count = min(5, len(case.tasks))
    for position, task in enumerate(case.tasks[:count]):
        actions = sample_actions(case, position)
        half = len(actions) // 2
        replay(case.env, task, actions[:half])
        key, saved = case.env.state_key(), save(case.env)
        expected = [record(case.env.step(action)) for action in actions[half:]]
        env = load(case.env, saved)
        require(env.state_key() == key, f"task {task.key} {where}: state_key() is another one")
        compare(expected, [record(env.step(action)) for action in actions[half:]], f"task {task.key} {where}")
        if env is not case.env:
            env.close()
    return f"{count} episodes go on as before"


def side_by_side(case: Case) -> str:
    played = [sample_actions(case, position) for position in range(min(4, len(case.tasks)))]
    expected = [replay(case.env, task, actions) for task, actions in zip(case.tasks, played)]
    several = [case.make() for _ in played]
    alternating = [[record(env.reset(options={"task": task}))] for env, task in zip(several, case.tasks)]
    for turn in range(max(map(len, played))):
        for env, actions, rows in zip(several, played, alternating):
            if turn < len(actions):
                rows.append(record(env.step(actions[turn])))
    with ThreadPoolExecutor(len(several)) as threads:
        threaded = list(threads.map(replay, several, case.tasks, played))
    for task, alone, rows, others in zip(case.tasks, expected, alternating, threaded):
        compare(alone, rows, f"task {task.key} beside others in turn")
        compare(alone, others, f"task {task.key} beside others in threads")
    for env in several:
        env.close()
    return f"{len(several)} environments, in turn and in threads"


def close_twice(case: Case) -> str:
    env = case.make()
    env.reset(seed=0, options={"split": case.split})
    env.close()
    env.close()
    case.make().close()
    return "after an episode and before any"


def no_leak(case: Case) -> str:
    if not Path("/proc/self/statm").exists():
        raise NotApplicable("memory is read from /proc, which this system lacks")

    def play(episodes: int) -> tuple[float, int]:
        for episode in range(episodes):
            position = episode % len(case.tasks)
            respond(case.env, case.tasks[position], random_responses(case.env, episode))
        gc.collect()
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE") / 1e6, len(os.listdir("/proc/self/fd"))
    before, files_before = play(10)  # caches fill
    after, files_after = play(LEAK_EPISODES)
    require(after - before < LEAK_MEGABYTES, f"{LEAK_EPISODES} episodes took {after - before:.0f} MB that stay")
    require(files_after - files_before < LEAK_FILES, f"{files_after - files_before} files stay open")
    return f"{LEAK_EPISODES} episodes: {max(0.0, after - before):.0f} MB"


def hostile_text(case: Case) -> str:
    texts = dict(HOSTILE)
    for tag in case.env.action_tags:
        texts |= {f"{name} in <{tag}>": f"<{tag}>{text}</{tag}>" for name, text in HOSTILE.items()}
    for name, text in texts.items():
        try:
            _survive(case.env, case.tasks[0], name, text)
        except Violation:
            raise
        except Exception as error:  # the property is that nothing is raised
            raise Violation(f"{name}: {type(error).__name__}: {error}") from error
    return f"{len(texts)} texts"


def _survive(env: TextEnv, task: Task, name: str, text: str) -> None:
    env.reset(options={"task": task})
    started = time.monotonic()
    env.parse(text)
    observation, _, terminated, truncated, info = env.step(text)
    env.state_key()
    require(time.monotonic() - started < HOSTILE_SECONDS, f"{name}: it took over {HOSTILE_SECONDS} s")
    require(_is_text(observation), f"{name}: the observation is not clean text: {observation!r}")
    require(info["turn"] == 1, f"{name}: the turn was not counted")
    require(not info["success"], f"{name}: it succeeds")
    if not (terminated or truncated):
        info = env.step(env.parse(env.random_action(np.random.default_rng(0))).text)[4]
        require(info["turn"] == 2, f"{name}: the next action was not counted")


def _is_text(text: Any) -> bool:
    """A string that every tokenizer takes."""
    return isinstance(text, str) and text == clean_text(text)


PROPERTIES: dict[str, Callable[[Case], str]] = {
    "gymnasium": gymnasium_check,
    "reset by seed": reset_seed,
    "reset to a task": reset_task,
    "determinism": determinism,
    "other processes": processes,
    "global generators": global_generators,
    "keys name worlds": same_key_same_world,
    "splits disjoint": splits_disjoint,
    "step values": step_values,
    "terminal observation": terminal_observation,
    "step after the end": step_after_end,
    "parse": parse_spans,
    "admissible actions": admissible_actions,
    "gold plan": gold_succeeds,
    "random agent": random_agent,
    "empty agent": empty_agent,
    "snapshot and restore": snapshot_restore,
    "pickling": pickling,
    "side by side": side_by_side,
    "close": close_twice,
    "no leak": no_leak,
    "hostile text": hostile_text,
}
"""Name and function of every property, in the order in which they are checked."""
