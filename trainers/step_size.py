"""A guard on the learning rate where the policy learns from old samples: the two-constraint rule.

Both errors of a step grow with how far the policy moves per unit of learning rate, G: in the S updates that a batch is
old, and over the T updates of the run. η ≤ s · min(R_batch / (S·G), R_crit / (T·G)). *Ours*: only the abstract of the
rule is public. Distance is here the mean |log π − log π_b| over a batch's tokens, which the learner measures anyway: at
age S it is about S·η·G.
"""

import math
from typing import Any

from pydantic import PositiveFloat

from trainers.settings import settings

SAFETY = 0.5
"""The s of the rule."""
DECAY = 0.9
"""Of the moving average of G."""


@settings
class StepSizeSettings:
    """The guard on the learning rate in asynchronous training; off where both radii are None."""

    batch_radius: PositiveFloat | None = None
    """R_batch: how far (mean |log-ratio|) the policy may move while a batch gets old; about that at which the clip
    fraction reaches 0.2."""
    run_radius: PositiveFloat | None = None
    """R_crit: how far it may move over the whole run, from a pilot run."""


def step_size_limit(growth: float, staleness: float, horizon: int, settings: StepSizeSettings) -> float:
    """The largest learning rate that both constraints allow; infinite where neither binds.

    `growth`: G. `staleness`: S ≥ 0, without which the first constraint falls away. `horizon`: T.
    """
    limits = [math.inf]
    if settings.batch_radius and staleness * growth > 0:
        limits.append(settings.batch_radius / (staleness * growth))
    if settings.run_radius and horizon * growth > 0:
        limits.append(settings.run_radius / (horizon * growth))
    return SAFETY * min(limits)


class StepSizeGuard:
    """Measures G during training and says which learning rate it allows."""

    def __init__(self, settings: StepSizeSettings, horizon: int):
        """`horizon`: updates of the run."""
        self._settings, self._horizon, self._growth = settings, horizon, 0.0

    def limit(self, staleness: float) -> float:
        """The largest learning rate for a batch of this mean age in updates; infinite as long as nothing is known."""
        return step_size_limit(self._growth, staleness, self._horizon, self._settings)

    def observe(self, drift: float, staleness: float, learning_rate: float) -> None:
        """The learner was `drift` (mean |log-ratio|) away from a batch of this mean age, moving at `learning_rate`."""
        if staleness > 0 and learning_rate > 0:
            growth = drift / (staleness * learning_rate)
            self._growth = DECAY * self._growth + (1 - DECAY) * growth if self._growth else growth

    def state(self) -> dict[str, Any]:
        return {"growth": self._growth}

    def load_state(self, state: dict[str, Any]) -> None:
        self._growth = state["growth"]
