"""Countdown with a calculator: reach a target with every given number used exactly once."""

from collections.abc import Sequence

import numpy as np

from envs.core import LazyTasks, Mistake, Outcome, Task, TextEnv
from envs.countdown_problems import Limits, Problem, random_expression, reserved_problems, training_problem
from envs.countdown_solver import solve
from envs.randomness import pick
from rewards.countdown import calculate, score_countdown
from rewards.tags import last_block

TRAINING_SIZE = 1_000_000
RESERVED_SIZES = {"heldout": 1024, "test": 50}
RULES = "Make the target from the numbers with + - * / and parentheses. Use every number exactly once. "
WITH_TOOL = ("Reply <tool>expression</tool> to calculate; you get <obs>value</obs>. "
             "Finish with <answer>expression</answer>.")
WITHOUT_TOOL = "Reply <answer>expression</answer>."


class Countdown(TextEnv):
    """Each response holds a `<tool>` block, answered by `<obs>value</obs>` or `<obs>error</obs>`, or an `<answer>`
    block, which ends the episode with reward 1 or 0; of several blocks the last one counts.

    After `tool_rounds` responses one more is left: only a right answer there succeeds, anything else is truncated.
    Without the tool there is one response, which ends the episode whatever it holds. The splits are `train` (1,000,000,
    made on demand), `heldout` (1,024) and `test` (50). A problem's key decides its split: whatever the options, no
    problem of one is in another.
    """

    action_tags = ("tool", "answer")

    def __init__(self, *, min_numbers: int = 3, max_numbers: int = 4, largest_number: int = 99,
                 smallest_target: int = 10, largest_target: int = 99, tool: bool = True, tool_rounds: int = 10,
                 demonstration_tries: int = 0):
        """`demonstration_tries` is the largest number of wrong tries that `gold` shows before the solution."""
        if tool_rounds < 1:
            raise ValueError(f"tool_rounds must be at least 1, got {tool_rounds}; tool=False plays without the tool")
        if not 0 <= demonstration_tries < tool_rounds:
            raise ValueError("demonstration_tries must be from 0 to tool_rounds - 1, so that the solution can be tried "
                             f"too, got {demonstration_tries} with tool_rounds={tool_rounds}")
        super().__init__(max_turns=tool_rounds + 1 if tool else 1)
        self.limits = Limits(min_numbers=min_numbers, max_numbers=max_numbers, largest_number=largest_number,
                             smallest_target=smallest_target, largest_target=largest_target)
        self.tool, self.demonstration_tries = tool, demonstration_tries
        self.system_prompt = RULES + (WITH_TOOL if tool else WITHOUT_TOOL)
        self.stop = ("</tool>", "</answer>") if tool else ("</answer>",)

    def tasks(self, split: str) -> Sequence[Task]:
        if split == "train":
            return LazyTasks(TRAINING_SIZE, lambda i: self._task(training_problem(self.limits, i), split))
        if split not in RESERVED_SIZES:
            raise ValueError(f"Countdown has no split {split!r}; it has 'train', 'heldout' and 'test'")
        problems = reserved_problems(self.limits, split, RESERVED_SIZES[split])
        return [self._task(problem, split) for problem in problems]

    def _task(self, problem: Problem, split: str) -> Task:
        return Task(key=problem.key, split=split, env_id=self.env_id, family=f"{len(problem.numbers)} numbers",
                    data={"numbers": list(problem.numbers), "target": problem.target})

    def _reset(self, task: Task, rng: np.random.Generator) -> str:
        self.numbers, self.target = list(task.data["numbers"]), task.data["target"]
        return f"Numbers: {' '.join(map(str, self.numbers))}. Target: {self.target}."

    def _step(self, action: str) -> Outcome:
        block = last_block(action, self.action_tags)
        if block is not None and block[1] == "answer":
            success = score_countdown(self.numbers, self.target, action) == 1.0
            return Outcome(observation="Right." if success else "Wrong.", reward=float(success), terminated=True,
                           success=success)
        if not self.tool:
            return Outcome(observation="No <answer>.", terminated=True, valid=False)
        if block is None:
            return Outcome(observation="Reply <tool>expression</tool> or <answer>expression</answer>.", valid=False)
        value = calculate(block[2])
        return Outcome(observation=f"<obs>{value}</obs>", valid=value != "error")

    def gold(self, rng: np.random.Generator) -> list[str]:
        """With the tool: some different wrong tries, the solution as a try, the solution; `rng` varies all of them.

        There are k wrong tries with probability 2^-(k+1), at most `demonstration_tries`. Each is an expression of all
        the numbers that would solve the problem for another target, and a `Mistake`.
        """
        solution = solve([self.numbers[i] for i in rng.permutation(len(self.numbers))], self.target)
        if solution is None:
            raise LookupError(f"no expression of {self.numbers} equals {self.target}")
        answer = f"<answer>{solution}</answer>"
        if not self.tool:
            return [answer]
        wanted = min(int(rng.geometric(0.5)) - 1, self.demonstration_tries)
        tries: dict[str, None] = {}
        for _ in range(100 * wanted):  # few numbers may allow fewer wrong tries than wanted
            if len(tries) == wanted:
                break
            expression = random_expression(rng, self.numbers)
            if expression.value != self.target and self.limits.allow(expression.value):
                tries[expression.text] = None
        return [*(Mistake(f"<tool>{text}</tool>") for text in tries), f"<tool>{solution}</tool>", answer]

    def random_action(self, rng: np.random.Generator) -> str:
        tag = pick(rng, self.action_tags) if self.tool else "answer"
        return f"<{tag}>{random_expression(rng, self.numbers).text}</{tag}>"
