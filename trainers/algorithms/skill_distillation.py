"""SDAR and SkillSD, ADRS's predecessors (as in the code of arXiv 2608.03223): GRPO, and beside it a loss that pulls the
policy towards what it says itself when it reads skills. With ℓᵀ the teacher's log-probability of a sampled token, ℓ the
policy's with gradient, mean over all sampled tokens of the batch:

    SDAR       L + 0.01 · mean sg σ(5 (ℓᵀ − ℓ)) (ℓᵀ − ℓ)                 towards tokens that the teacher prefers
    SkillSD    L + 0.01 · mean ρ (e^{ℓᵀ − ℓ} − 1 + ℓ − ℓᵀ),  ρ = π/π_b    estimates KL(π‖π_T), and so does its gradient

SkillSD's coefficient is ours.
"""

from collections.abc import Sequence
from dataclasses import replace

from pydantic import NonNegativeFloat, PositiveFloat
from torch import Tensor

from agents.trajectory import Group
from trainers.algorithms.base import Scores
from trainers.algorithms.grpo import GRPO
from trainers.algorithms.skill_teacher import SkillTeacher
from trainers.credit import Credit
from trainers.loss import LossInput, aggregate, importance_ratio, kl
from trainers.settings import settings


@settings
class SkillDistillation(SkillTeacher):
    """Adds to the loss how far the policy is from a teacher that reads skills."""

    distillation_coefficient: NonNegativeFloat = 0.01
    """Weight of that term; 0 is the base."""

    def active(self, step: int) -> bool:
        return self.distillation_coefficient > 0

    def advantages(self, groups: Sequence[Group], scores: Scores | None = None,
                   step: int = 0) -> list[list[Credit]]:
        credits = super().advantages(groups, scores, step)
        if not self.active(step):
            return credits
        return [[replace(credit, extra={**credit.extra, "teacher_logprobs": tuple(teacher)})
                 for credit, teacher in zip(members, teachers, strict=True)]
                for members, teachers in zip(credits, self.given(scores, "teacher_logprobs"), strict=True)]

    def further_terms(self, tokens: LossInput) -> dict[str, tuple[float, Tensor]]:
        terms = super().further_terms(tokens)
        if not self.active(tokens.step):
            return terms
        distillation = aggregate(self.divergence(tokens, tokens.extra["teacher_logprobs"]), counts=tokens.counts)
        return {**terms, "distillation": (self.distillation_coefficient, distillation)}

    def divergence(self, tokens: LossInput, teacher: Tensor) -> Tensor:
        """What is averaged and lowered. # [tokens]"""
        raise NotImplementedError


@settings
class GatedDistillation(SkillDistillation):
    """Only as far as the teacher prefers a token."""

    gate_sharpness: PositiveFloat = 5.0
    """β."""

    def divergence(self, tokens: LossInput, teacher: Tensor) -> Tensor:
        gap = teacher - tokens.logprobs
        return (self.gate_sharpness * gap.detach()).sigmoid() * gap


@settings
class ReverseDistillation(SkillDistillation):
    """The reverse KL divergence, reweighted from the policy that sampled."""

    def divergence(self, tokens: LossInput, teacher: Tensor) -> Tensor:
        return importance_ratio(tokens.logprobs, tokens.behaviour_logprobs) * kl(tokens.logprobs, teacher, "k3")


@settings
class SDAR(GatedDistillation, GRPO):
    """GRPO that also imitates itself with skills, where those make a token likelier."""


@settings
class SkillSD(ReverseDistillation, GRPO):
    """GRPO held near itself with skills."""
