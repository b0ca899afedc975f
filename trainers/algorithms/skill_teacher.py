"""A teacher that reads skills, general advice, in front of each prompt: what ADRS and its predecessors share."""

from dataclasses import replace

from agents.trajectory import Trajectory
from trainers.algorithms.base import Needs, PerTurn, Scores
from trainers.algorithms.modifier import Modifier
from trainers.settings import settings
from trainers.skills import load_skills
from trainers.teacher import Insertion

HEADER = "[Privileged Skill Information]"


@settings
class SkillTeacher(Modifier):
    """Asks a teacher in the steps in which it is `active`; rollouts never read the skills."""

    skills: str | None = None
    """TOML file of skills; None: the one in `trainers/skills` for the environment."""

    @property
    def needs(self) -> Needs:
        return replace(super().needs, teacher_logprobs=True)

    def active(self, step: int) -> bool:
        """Whether the teacher matters in a step, counted from 0."""
        raise NotImplementedError

    def insertion(self, trajectory: Trajectory, turn: int, step: int) -> Insertion | None:
        return skill_insertion(trajectory, self.skills) if self.active(step) else None

    def given(self, scores: Scores | None, name: str) -> PerTurn:
        """A member of `scores`. Raises ValueError where it is missing."""
        if (values := getattr(scores, name, None)) is None:
            raise ValueError(f"{type(self).__name__} needs scores.{name}, log-probabilities of the sampled tokens: "
                             "pass what Learner.score gives")
        return values


def skill_insertion(trajectory: Trajectory, path: str | None = None) -> Insertion:
    """The skills for the trajectory's task, as they stand before each of its prompts. `path`: see `load_skills`."""
    skills = load_skills(trajectory.task.env_id, path).match(trajectory.task, trajectory.first_observation)
    return Insertion(before=f"{HEADER}\n{skills}\n\n")
