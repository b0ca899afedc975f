"""Keeping an engine on the learner's weights, and seeing at once where it is not.

After each sync a fixed text is scored on both sides. What differs is the gap: rounding where all is well (nothing in
float32), much more where a sync went wrong, a tensor stayed old or an adapter was lost.
"""

import time
import warnings

import numpy as np

from agents.engine import Engine, EngineError
from agents.models import Policy
from agents.scoring import score_sequences

PROBE = ("Using the numbers 3, 7 and 25, make 4. <think>25 - 3 * 7 = 25 - 21 = 4. That is right.</think>\n"
         "The capital of France is Paris. def f(x): return x + 1")
PROBE_TOKENS = 64
ALARM = 0.5
"""Share of the limit at which a warning says that the gap grows."""


class WeightSyncError(EngineError):
    """The engine's policy is not the learner's."""


class WeightSync:
    """Brings a policy's weights to an engine of its own."""

    def __init__(self, engine: Engine, policy: Policy, *, gap_limit: float | None):
        """`gap_limit`: mean difference of log-probabilities, in nats, past which WeightSyncError is raised; None: the
        engine reads the policy's own tensors, so that nothing can differ."""
        self._engine, self._policy, self._limit = engine, policy, gap_limit
        ids = policy.tokenizer(PROBE, add_special_tokens=False)["input_ids"]
        self._probe = np.array(ids[:min(PROBE_TOKENS, policy.max_context - 1)], np.int64)

    def __call__(self, version: int) -> dict[str, float]:
        """From now on the engine samples with the policy's weights as they are, called `version`.

        Returns metrics. Raises EngineError where a replica cannot be brought to them, and WeightSyncError.
        """
        if self._limit is None:
            self._engine.load({}, version)
            return {}
        began = time.perf_counter()
        self._engine.load(self._policy.model.state_dict(), version)
        synced = time.perf_counter()
        gap = self.gap()
        if not gap <= self._limit:
            raise WeightSyncError(
                f"after weights {version} were sent, engine and learner differ by {gap:.2g} nats a token on a fixed "
                f"text, more than engine.gap_limit = {self._limit:g}: the sync went wrong, or the engine computes "
                "another function (look at engine.dtype, quantisation, its version of the model)")
        if gap > ALARM * self._limit:
            warnings.warn(f"engine and learner differ by {gap:.2g} nats a token after weights {version} were sent; at "
                          f"{self._limit:g} the run stops", stacklevel=2)
        return {"sync_gap": gap, "sync_seconds": synced - began}

    def gap(self) -> float:
        """The mean difference on the fixed text, of the replica where it is largest."""
        with self._policy.precision():
            learner = score_sequences(self._policy.model, [self._probe])[0]
        return max(float(np.abs(found - learner)[1:].mean())
                   for found in self._engine.score([self._probe] * self._engine.replica_count))
