"""STAMP (arXiv 2607.11172): the steps that found what the answer stands on are rewarded more and punished less.

    K_u = documents cited in the answer that support unit u of the question's evidence graph
    credit_d = Σ_{u: d ∈ K_u} δ / |K_u|                        a unit's δ in equal parts
    c_{i,t} = min(C, Σ credit_d)                              over the documents that step t was the first to show
    A_{i,t} ← A_{i,t} (1 + sgn(A_{i,t}) c_{i,t})              A: GRPO's, or that of the algorithm it is built on

Returns, and so the order of a group's trajectories, stay as they are; the sum over a trajectory does not, unless
`renormalise` (ours) divides the factors by their mean over its tokens. The paper asks a language model which documents
support a unit; `rewards.evidence` (ours) reads them. The graph is `Task.data["evidence"]`; a turn's `info["exposed"]`
names the documents that it showed (ids, or ids with texts), and the last turn's `info["cited"]` those cited.
"""

import warnings
from collections.abc import Sequence
from dataclasses import replace
from typing import Annotated

import numpy as np
from pydantic import Field, NonNegativeFloat

from agents.trajectory import Group, Trajectory
from rewards.evidence import cited_support, mentions, shown_documents, step_credit
from trainers.algorithms.base import Scores
from trainers.algorithms.grpo import GRPO
from trainers.algorithms.modifier import Modifier
from trainers.credit import Credit
from trainers.settings import settings


@settings
class EvidenceCredit(Modifier):
    """Modulates each turn's advantage by the evidence that the turn found, never changing its sign."""

    unit_credit: NonNegativeFloat = 0.03
    """δ: what a supported unit is worth."""
    step_cap: Annotated[float, Field(ge=0, lt=1)] = 0.1
    """C: most that one step may get."""
    renormalise: bool = False
    """Divide the factors by their mean over the trajectory's tokens."""
    cite_answers: bool = False
    """Take every shown document that holds a gold answer as cited, for environments without citations."""
    rubric_weight: NonNegativeFloat = 0.0
    """Added to the return: this times the share of units that cited documents support (a citation rubric)."""

    def reward(self, trajectory: Trajectory) -> float | None:
        reward = super().reward(trajectory)
        if reward is None or self.rubric_weight == 0.0:
            return reward
        support = self._support(trajectory)
        return reward + self.rubric_weight * sum(map(bool, support)) / max(1, len(support))

    def advantages(self, groups: Sequence[Group], scores: Scores | None = None,
                   step: int = 0) -> list[list[Credit]]:
        credits = super().advantages(groups, scores, step)
        return [[self._modulated(credit, trajectory) for credit, trajectory in zip(members, group.trajectories)]
                for members, group in zip(credits, groups)]

    def step_credit(self, trajectory: Trajectory) -> np.ndarray:
        """c_{i,t}, 0 to `step_cap`. # float64 [turns]"""
        return step_credit(self._support(trajectory), _shown(trajectory), unit_credit=self.unit_credit,
                           cap=self.step_cap)

    def _modulated(self, credit: Credit, trajectory: Trajectory) -> Credit:
        steps = self.step_credit(trajectory)
        if not steps.any():
            return credit
        factors = [1 + np.sign(turn) * np.float32(value) for turn, value in zip(credit.advantages, steps)]
        mean = np.concatenate(factors).mean() if self.renormalise else np.float32(1)
        return replace(credit, advantages=tuple(turn * (factor / mean)
                                                for turn, factor in zip(credit.advantages, factors)))

    def _support(self, trajectory: Trajectory) -> list[set[str]]:
        evidence = trajectory.task.data.get("evidence")
        if evidence is None:
            warnings.warn(f"a task of {trajectory.task.env_id or 'this environment'} has no evidence graph in "
                          "Task.data['evidence']: STAMP changes nothing there", stacklevel=2)
            return []
        shown = _shown(trajectory)
        cited = trajectory.turns[-1].info.get("cited", ()) if trajectory.turns else ()
        if self.cite_answers:
            answers = trajectory.task.data.get("answers", ())
            known = {name for entity in evidence["entities"] if set(entity["aliases"]) & set(answers)
                     for name in entity.get("documents", ())}
            cited = [*cited, *known, *(name for documents in shown for name, text in documents.items()
                                       if mentions(text, answers))]
        return cited_support(evidence, shown, cited)


@settings
class STAMP(EvidenceCredit, GRPO):
    """GRPO whose evidence-finding steps weigh more in successes and less in failures."""


def _shown(trajectory: Trajectory) -> list[dict[str, str]]:
    return shown_documents([turn.info.get("exposed", ()) for turn in trajectory.turns])
