"""ADRS (arXiv 2608.03223): reward shaping by a teacher that reads skills, the policy itself told more in training.

For turn s with tokens j, and the same weights and response ids, ℓᵀ under the skills before the prompt and ℓᵇ without:

    q_{s,j} = (ℓᵀ_{s,j} − mean_j ℓᵀ) / (σ + 1e-8)      sums to 0 in each turn: no return and no A changes by it
    α_u = σ((mean ℓᵀ of turn u − its mean over the batch) / T)
    d = Σ α R / Σ α − Σ (1−α) R / Σ (1−α)              over the turns of a group (L2), or of one anchor state (L3)
    m = σ(τ d)                                          L1: σ(τ (ℓᵀ − ℓʳᵉᶠ) / std), per token; none: ½
    A ← A + clip(± η m Z(q), ± c)                      after_whiten (ours)
    A ← A + clip(± η Z(η m q), ± c)                    before_whiten (the authors'; at L2 the gate cancels in Z)
    A ← A ((1−η) + η clip(e^{sgn(A)(ℓᵀ−ℓᵇ)}, 1 ± c))    multiplicative: never changes a sign

Z shifts and scales over all tokens of the group. The bound c shrinks where returns (over GiGPO: advantages) differ less
than in the median group, and groups in which nothing differs get no signal. While the signal lasts entropy is rewarded
more. The authors' automatic η is left out: it rescales a factor of q that cancels in Z. RLSD, their predecessor, is the
multiplicative form with an η that falls linearly from 0.5 to 0 in 50 steps (docs/algorithms.md).
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated, Literal

import numpy as np
from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, model_validator

from agents.trajectory import Group
from trainers.algorithms.base import Needs, Scores, faded
from trainers.algorithms.gigpo import AnchorStates
from trainers.algorithms.grpo import GRPO
from trainers.algorithms.skill_teacher import SkillTeacher
from trainers.credit import EPSILON, Credit
from trainers.settings import settings
from trainers.shaping import (
    TokenTable,
    advantage_spreads,
    bounds,
    centred,
    multiplied,
    preference_gate,
    return_spreads,
    sigmoid,
    whitened,
)


@settings
class SkillShaping(SkillTeacher):
    """Adds to each token's advantage how much a teacher that knows the skills prefers it to the turn's other tokens."""

    form: Literal["additive", "multiplicative"] = "additive"
    eta: Annotated[float, Field(ge=0, le=1)] = 0.02
    """η: strength of the signal; 0 is the base."""
    teacher_clip: Annotated[float, Field(ge=0, le=1)] = 0.2
    """c: most that the signal may add, or change a factor by."""
    adaptive_clip: bool = True
    """Lower c in groups that differ less than the median group."""
    sign: Literal[1, -1] = 1
    """−1 turns the signal round."""
    positive_only: bool = False
    """Leave tokens whose advantage is not positive as they are."""
    standardise_over: Literal["turn", "batch"] = "turn"
    """Where σ is taken."""
    gate: Literal["auto", "L3", "L2", "L1", "none"] = "L2"
    """Level of the gate m; `auto`: L3 over GiGPO, else L2."""
    gate_position: Literal["after_whiten", "before_whiten"] = "after_whiten"
    gate_sharpness: PositiveFloat = 2.0
    """τ."""
    gate_temperature: PositiveFloat = 1.0
    """T."""
    standardise_gate: bool = False
    """Divide every d by the standard deviation of all of the batch."""
    shaping_warmup_steps: NonNegativeInt = 20
    """Steps before the signal sets in."""
    shaping_steps: NonNegativeInt = 50
    """Steps that it lasts; 0: to the end."""
    eta_decay_steps: NonNegativeInt = 0
    """Steps from when it sets in until η has fallen linearly to 0 (RLSD: 50); 0: η stays."""
    shaping_entropy_coefficient: NonNegativeFloat = 0.01
    """What `entropy_coefficient` is raised to while it lasts."""

    @model_validator(mode="after")
    def _check_gate(self):
        if self.gate == "L3" and not isinstance(self, AnchorStates):
            raise ValueError("gate 'L3' compares turns in the same state: name the algorithm ADRS+GiGPO")
        return self

    @property
    def needs(self) -> Needs:
        needs, reference = super().needs, self.gate == "L1"
        return replace(needs, entropy=needs.entropy or (self.eta > 0 and self.shaping_entropy_coefficient > 0),
                       reference_scores=reference, reference_logprobs=needs.reference_logprobs or reference)

    def active(self, step: int) -> bool:
        return self.strength(step) > 0

    def strength(self, step: int) -> float:
        """η in a step, counted from 0; 0 outside the window."""
        since = step - self.shaping_warmup_steps
        if since < 0 or 0 < self.shaping_steps <= since:
            return 0.0
        return self.eta * faded(since, self.eta_decay_steps) if self.eta_decay_steps else self.eta

    def entropy_weight(self, step: int) -> float:
        weight = super().entropy_weight(step)
        return max(weight, self.shaping_entropy_coefficient) if self.active(step) else weight

    def advantages(self, groups: Sequence[Group], scores: Scores | None = None,
                   step: int = 0) -> list[list[Credit]]:
        credits = super().advantages(groups, scores, step)
        if not self.active(step):
            return credits
        table = TokenTable(groups, [self.returns(group) for group in groups])
        before = table.flat([[credit.advantages for credit in members] for members in credits])
        teacher = table.flat(self.given(scores, "teacher_logprobs"))
        if not len(teacher):
            return credits
        eta = self.strength(step)
        if self.form == "multiplicative":
            after = multiplied(before, self.sign * (teacher - table.behaviour()), eta, self.teacher_clip)
        else:
            bound = self._bounds(groups, credits)[table.group]
            after = before + np.clip(self.sign * eta * self._signal(table, teacher, groups, scores, eta), -bound, bound)
        return table.put(np.where(before > 0, after, before) if self.positive_only else after, credits)

    def _signal(self, table: TokenTable, teacher: np.ndarray, groups, scores, eta: float) -> np.ndarray:
        """m Z(q), or Z(η m q). # float64 [tokens]"""
        preference = centred(teacher, table.turn, over_batch=self.standardise_over == "batch")
        gate = self._gate(table, teacher, groups, scores)
        if self.gate_position == "before_whiten":
            return whitened(eta * gate * preference, table.group)
        return gate * whitened(preference, table.group)

    def _gate(self, table: TokenTable, teacher: np.ndarray, groups, scores) -> np.ndarray:
        """m of each token, between 0 and 1. # float64 [tokens]"""
        level = self.gate if self.gate != "auto" else "L3" if isinstance(self, AnchorStates) else "L2"
        if level == "none":
            return np.full(len(teacher), 0.5)
        if level == "L1":
            gaps = teacher - table.flat(self.given(scores, "reference_logprobs"))
            return sigmoid(self.gate_sharpness * gaps / (gaps.std() + EPSILON))
        returns, unit = table.turn_return, table.turn_group
        if level == "L3":
            returns = table.of_turns([self.step_returns(group) for group in groups])
            states = table.of_turns([self.states(group) for group in groups])
            unit = np.unique(np.column_stack([unit, states]), axis=0, return_inverse=True)[1]
        return preference_gate(teacher, table.turn, returns, unit, sharpness=self.gate_sharpness,
                               temperature=self.gate_temperature, standardise=self.standardise_gate)

    def _bounds(self, groups: Sequence[Group], credits: Sequence[Sequence[Credit]]) -> np.ndarray:
        """c of each group, 0 where nothing differs. # float64 [groups]"""
        returns = [self.returns(group) for group in groups]
        spreads = advantage_spreads(credits) if isinstance(self, AnchorStates) else return_spreads(returns)
        return bounds(spreads, returns, self.teacher_clip, adaptive=self.adaptive_clip)


@settings
class ADRS(SkillShaping, GRPO):
    """GRPO shaped by a teacher that reads skills; `ADRS+GiGPO` is the same over GiGPO."""
