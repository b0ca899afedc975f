"""The algorithms, one file each; `find_algorithm` finds them, and a user's own, by name."""

import difflib
import importlib
import inspect
import sys
from types import ModuleType

from trainers.algorithms.adrs import ADRS
from trainers.algorithms.base import Algorithm, Needs, Scores
from trainers.algorithms.dapo import DAPO
from trainers.algorithms.factor import FACTOR
from trainers.algorithms.gigpo import GiGPO
from trainers.algorithms.grpo import GRPO
from trainers.algorithms.modifier import compose
from trainers.algorithms.planpo import PlanPO
from trainers.algorithms.ppo import PPO
from trainers.algorithms.rloo import RLOO
from trainers.algorithms.rloo_plus_plus import RLOOpp
from trainers.algorithms.serl import SERL
from trainers.algorithms.skill_distillation import SDAR, SkillSD
from trainers.algorithms.stamp import STAMP
from trainers.settings import SettingsError

__all__ = ["ADRS", "DAPO", "FACTOR", "GRPO", "PPO", "RLOO", "SDAR", "SERL", "STAMP", "Algorithm", "GiGPO", "Needs",
           "PlanPO", "RLOOpp", "Scores", "SkillSD", "find_algorithm"]


def find_algorithm(name: str) -> type[Algorithm]:
    """The algorithm of that name here, or `module:Class` of a user's own file; `A+B` is A built on B.

    Raises SettingsError, with the nearest name, where there is none, and where the class is not an algorithm.
    """
    modifying, plus, base = name.partition("+")
    if plus:
        return compose(find_algorithm(modifying), find_algorithm(base))
    module_name, _, class_name = name.rpartition(":")
    if not module_name:
        return _member(sys.modules[__name__], name, f"unknown algorithm {name!r}")
    if not all(module_name.split(".")):
        raise SettingsError(f"algorithm {name!r}: {module_name!r} is no module's name; give module:Class")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise  # the user's file was found; what it imports was not
        raise SettingsError(f"algorithm {name!r}: no module {module_name!r} here or installed") from None
    return _member(module, class_name, f"{module_name!r} has no algorithm {class_name!r}")


def _member(module: ModuleType, class_name: str, problem: str) -> type[Algorithm]:
    classes = {member: value for member, value in vars(module).items()
               if inspect.isclass(value) and issubclass(value, Algorithm) and value is not Algorithm}
    if class_name in classes:
        return classes[class_name]
    by_lower = {member.lower(): member for member in classes}
    nearest, *others = [by_lower[match] for match in difflib.get_close_matches(
        class_name.lower(), by_lower, n=len(by_lower) + 1, cutoff=0.0)] or [None]
    hint = f"the nearest is {nearest!r}" if nearest else "it defines no subclass of Algorithm"
    raise SettingsError(f"{problem}; {hint}" + (f", others are {', '.join(others)}" if others else ""))
