"""Skills: general advice about an environment and its kinds of tasks, which only a teacher reads.

One TOML file per environment, named after it (`alfworld.toml` for `turngym/ALFWorld-v0`): `general`, and under `skills`
for each kind of task its `text`, the `families` (patterns) of its tasks and `keywords` (patterns) of its prompts.
"""

import re
from dataclasses import field
from functools import lru_cache
from pathlib import Path

from envs.core import Task
from trainers.settings import SettingsError, read_toml, settings, validate

FOLDER = Path(__file__).parent
NAME = re.compile(r"(?:.*/)?(?P<name>[^/]+?)(?:-v\d+)?")


@settings
class Skill:
    """Advice on one kind of task."""

    text: str
    families: tuple[str, ...] = ()
    keywords: tuple[str, ...] = ()


@settings
class SkillLibrary:
    """An environment's skills."""

    general: str
    skills: dict[str, Skill] = field(default_factory=dict)

    def match(self, task: Task, prompt: str) -> str:
        """The general advice, and that for the kind of task: the first kind that knows the task's family (or
        `data["source"]`, the data set that it is of); else every kind of which a keyword stands in the prompt."""
        names = [name.lower() for name in (task.data.get("source"), task.family) if name]
        known = [skill for skill in self.skills.values()
                 if any(re.fullmatch(pattern, name) for pattern in skill.families for name in names)][:1]
        matching = known or [skill for skill in self.skills.values()
                             if any(re.search(rf"\b(?:{pattern})\b", prompt.lower()) for pattern in skill.keywords)]
        return "\n\n".join(part.strip() for part in (self.general, *(skill.text for skill in matching)))


@lru_cache(maxsize=32)
def load_skills(env_id: str, path: str | None = None) -> SkillLibrary:
    """The skills in a file, by default the one here for an environment. Raises SettingsError where there is none."""
    name = NAME.fullmatch(env_id)["name"].lower() if env_id else ""
    file = Path(path) if path else FOLDER / f"{name}.toml"
    if not path and not file.exists():
        known = ", ".join(sorted(one.stem for one in FOLDER.glob("*.toml")))
        raise SettingsError(f"no skills for the environment {env_id!r} (there are some for {known}): write a file of "
                            "them and name it in algorithm.skills")
    return validate(SkillLibrary, read_toml(file), section=str(file))
