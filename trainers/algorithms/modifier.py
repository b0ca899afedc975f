"""Algorithms that change what another one's hooks give, and their composition by name.

A `Modifier` stands before an algorithm among the bases of a class and reaches its hooks through `super()`. The class
has the settings of both, side by side, and the loss and the needs of the algorithm:

    class STAMP(EvidenceCredit, GRPO)      STAMP as it stands: over GRPO
    compose(STAMP, GiGPO)                  the same over GiGPO; in a config: algorithm.name = "STAMP+GiGPO"
"""

from functools import cache

from trainers.algorithms.base import Algorithm
from trainers.settings import SettingsError, settings


class Modifier:
    """Marks a settings class whose hooks call those of `super()` and change what they give."""


@cache
def compose(modifying: type[Algorithm], base: type[Algorithm]) -> type[Algorithm]:
    """The modifiers of one algorithm over another. Raises SettingsError where it has none, or the other has them too.
    """
    parts = [part for part in modifying.__mro__
             if issubclass(part, Modifier) and part is not Modifier and not issubclass(part, Algorithm)]
    name = f"{algorithm_name(modifying)}+{algorithm_name(base)}"
    if not parts:
        raise SettingsError(f"algorithm {name!r}: {modifying.__name__} does not build on another algorithm; those that "
                            "do come first, as in 'GiGPO+PlanPO'")
    if any(issubclass(base, part) for part in parts):
        raise SettingsError(f"algorithm {name!r}: {base.__name__} is built on {modifying.__name__} already")
    return settings(type(name, (*parts, base), {"__module__": __name__, "__doc__": modifying.__doc__}))


def algorithm_name(algorithm: type[Algorithm]) -> str:
    """What `find_algorithm` finds the class by."""
    own = algorithm.__module__.startswith("trainers.algorithms")
    return algorithm.__name__ if own else f"{algorithm.__module__}:{algorithm.__name__}"
