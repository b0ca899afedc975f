"""Environment classes as TRL's `environment_factory` takes them: `reset(**row)`, and methods as tools.

    envs.make("turngym/TRL-v0", environment="my_env:WordleEnv", rows="train.jsonl")
"""

import inspect
import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from envs.adapters.foreign import ForeignEnv, load_class, read_rows, row_tasks, split_prompt
from envs.core import Outcome, Task

NO_TOOLS = {"reset", "get_reward", "close"}
RULES = """Reply with one call inside <tool_call></tool_call>, as in
<tool_call>{"name": "...", "arguments": {...}}</tool_call>
A reply without a call ends the episode. The tools:"""


class TRL(ForeignEnv):
    """Each response calls one tool; one without a call ends the episode, as in TRL. The reward is what the environment
    says at the end, by `get_reward()` or in its attribute `reward`. An exception that a tool raises is its answer, and
    the call invalid; one of the outside world (OSError) is an error of the environment.
    """

    action_tags = ("tool_call",)
    stop = ("</tool_call>",)
    max_turns = 20

    def __init__(self, *, environment: str, rows: str, max_turns: int | None = None):
        """`environment`: `module:Class`. `rows`: a JSONL file or a folder of them, whose columns `reset` receives; the
        column `prompt`, where there is one, is shown before what `reset` returns. Raises ValueError for a class that
        does not fit, and what `read_rows` raises."""
        super().__init__(max_turns=max_turns)
        self._class = load_class(environment)
        names = [name for name, _ in inspect.getmembers(self._class, callable)
                 if not name.startswith("_") and name not in NO_TOOLS]
        if not callable(getattr(self._class, "reset", None)) or not names:
            raise ValueError(f"{environment} needs a method reset(self, **row) and at least one public method as tool")
        self._tools = names
        self._rules = "\n\n".join([RULES, *(_described(getattr(self._class, name)) for name in names)])
        self.system_prompt = self._rules
        self._rows = read_rows(rows)
        self._env: Any = None

    def tasks(self, split: str) -> Sequence[Task]:
        return row_tasks(self._rows, split, self.env_id)

    def close(self) -> None:
        if hasattr(self._env, "close"):
            self._env.close()
        self._env = None

    def _reset(self, task: Task, rng: np.random.Generator) -> str:
        self.close()
        self._env = self._class()
        system, question = split_prompt(task.data.get("prompt", ""), f"row {task.key}")
        self.system_prompt = f"{system}\n\n{self._rules}".strip()
        said = self._env.reset(**task.data)
        return "\n\n".join(part for part in (question, said) if part)

    def _step(self, action: str) -> Outcome:
        if not action:
            return self._outcome("", over=True, valid=len(self._actions) > 1)  # to do nothing at all is no action
        try:
            tool, arguments = self._call(action)
        except ValueError as error:
            return self._outcome(f"No call: {error}", valid=False)
        try:
            answer = tool(**arguments)
        except OSError:
            raise
        except Exception as error:  # how a tool says that a call was wrong
            return self._outcome(str(error) or type(error).__name__, valid=False)
        return self._outcome("" if answer is None else str(answer))

    def _outcome(self, observation: str, *, over: bool = False, valid: bool = True) -> Outcome:
        over = over or bool(getattr(self._env, "done", False))
        if not over and len(self._actions) < self.max_turns:
            return Outcome(observation=observation, valid=valid)
        env = self._env
        reward = env.get_reward() if hasattr(env, "get_reward") else getattr(env, "reward", 0.0)
        return replace(self.outcome(observation, reward, terminated=over, info={}), valid=valid)

    def _call(self, text: str) -> tuple[Callable, dict[str, Any]]:
        """The tool and the arguments that the text names. Raises ValueError that tells the agent what is wrong."""
        try:
            call = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"this is no JSON ({error})") from error
        if not isinstance(call, dict) or not isinstance(call.get("arguments", {}), dict):
            raise ValueError('write {"name": "...", "arguments": {...}}')
        if call.get("name") not in self._tools:
            raise ValueError(f"there is no tool {call.get('name')!r:.100}; there are {', '.join(self._tools)}")
        tool, arguments = getattr(self._env, call["name"]), call.get("arguments", {})
        try:
            inspect.signature(tool).bind(**arguments)
        except TypeError as error:
            raise ValueError(f"{call['name']}: {error}") from error
        return tool, arguments


def _described(method: Callable) -> str:
    parameters = [p for p in inspect.signature(method).parameters.values() if p.name != "self"]
    return f"{method.__name__}({', '.join(map(str, parameters))})\n{inspect.getdoc(method) or ''}".strip()
